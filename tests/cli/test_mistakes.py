"""Whatever is typed wrong: one line that says what, exit code 2, and nothing on disk."""

from pathlib import Path

import pytest

from tests.cli.conftest import QUICK, TRAIN, Cli, tree

LONG = "x" * 300
HUGE = "9" * 5000

TRAINING = [
    (["--algo", "fedavgg"], "did you mean fedavg?"),
    (["--algo", ""], "algorithm '' is not known"),
    (["--algo", LONG], "is not known"),
    (["--model", ":warning:"], "model ':warning:' is not known"),
    (["--algo", "[red]fedavg[/red]x"], "algorithm '[red]fedavg[/red]x' is not known"),
    (["--algo", "fed\x1b[31mavg\x07"], "algorithm 'fed?[31mavg?' is not known"),
    (["--data", "digitz"], "did you mean digits?"),
    (["--data", "npz:missing.npz"], "missing.npz"),
    (["--data", f"npz:{LONG}"], "File name too long"),
    (["--model", "mpl"], "did you mean mlp?"),
    (["--split", "nowhere"], "no layer 'nowhere'"),
    (["--partition", "diri"], "partition is 'diri'"),
    (["--partition", "dirichlet", "--alpha", "0"], "alpha is 0.0; it must be greater than 0"),
    (["--alpha", "nan"], "alpha is nan; it must be a finite number"),
    (["--alpha", "inf"], "alpha is inf"),
    (["--alpha", "-1"], "alpha is -1.0"),
    (["--alpha", "much"], "--alpha"),
    (["--lr", "nan"], "lr is nan"),
    (["--lr", "-inf"], "lr is -inf"),
    (["--lr", "0"], "lr is 0.0"),
    (["--lr-decay", "0"], "lr_decay is 0.0"),
    (["--lr-decay", "1.1"], "lr_decay is 1.1"),
    (["--rounds", "0"], "rounds is 0"),
    (["--rounds", "-3"], "rounds is -3"),
    (["--rounds", "1.5"], "--rounds"),
    (["--rounds", "1000000000000"], "rounds is 1000000000000"),
    (["--rounds", HUGE], "--rounds"),
    (["--rounds"], "requires an argument"),
    (["--clients", "0"], "clients is 0"),
    (["--clients", "1000"], "ask for at most 898"),
    (["--clients", "1000000000"], "clients is 1000000000"),
    (["--batch-size", "0"], "batch_size is 0"),
    (["--local-epochs", "-1"], "local_epochs is -1"),
    (["--participation", "0"], "participation is 0.0"),
    (["--participation", "1.01"], "participation is 1.01"),
    (["--drop-rate", "-0.1"], "drop_rate is -0.1"),
    (["--victims", "0"], "victims is 0"),
    (["--victim-batch", "100000"], "a victim batch of 100000 does not fit"),
    (["--victim-steps", "0"], "victim_steps is 0"),
    (["--classes-per-client", "0"], "classes_per_client is 0"),
    (["--seed", "-1"], "seed is -1"),
    (["--seed", "abc"], "--seed"),
    (["--eval-every", "0"], "eval_every is 0"),
    (["--workers", "0"], "workers is 0"),
    (["--executor", "threads"], "executor is 'threads'"),
    (["--device", "tpu"], "device is 'tpu'"),
    (["--kind", "neither"], "kind is 'neither'"),
    (["--test", "none"], "test is 'none'"),
    (["--test", "given"], "marks no test rows"),
    (["--buffers", "x"], "buffers is 'x'"),
    (["--capture-rounds", "1"], "the run has rounds 0 to 0"),
    (["--capture-rounds", "-1"], "which is no number >= 0"),
    (["--capture-rounds", ""], "which is no number >= 0"),
    (["--capture-rounds", "frist"], "capture_rounds has 'frist'"),
    (["--capture-rounds", "every:0"], "capture_rounds has 'every:0'"),
    (["--capture-rounds", "every:"], "capture_rounds has ''"),
    (["--capture-rounds", "²"], "capture_rounds has '²'"),
    (["--capture-rounds", HUGE], "which is no number >= 0"),
    (["--capture-clients", "4"], "clients 0 to 3"),
    (["--capture-clients", "random:5"], "asks for 5 clients; the federation has 4"),
    (["--capture-clients", "random:0"], "asks for 0 clients"),
    (["--capture-clients", "a"], "capture_clients has 'a'"),
    (["--defense", "nothing"], "defense 'nothing' is not known"),
    (["--defense", "prun"], "did you mean prune?"),
    (["--defense", "clip:bond=1"], "did you mean bound?"),
    (["--defense", "clip:bound=0"], "defense clip: bound is 0"),
    (["--defense", "gaussian:std=-1"], "defense gaussian: std is -1"),
    (["--defense", "gaussian:std=nan"], "defense gaussian: std is nan"),
    (["--defense", "laplace:scale=-1"], "defense laplace: scale is -1"),
    (["--defense", "prune:keep=0"], "defense prune: keep is 0"),
    (["--defense", "prune:keep=1.5"], "defense prune: keep is 1.5"),
    (["--defense", "prune:scope=x"], "defense prune: scope is 'x'"),
    (["--defense", "qsgd:bits=1"], "defense qsgd: bits is 1"),
    (["--defense", "qsgd:bits=2.5"], "defense qsgd: bits is 2.5"),
    (["--defense", "sign:bits=1"], "defense sign has no setting 'bits'"),
    (["--defense", "dp-fedavg"], "give epsilon or noise_multiplier"),
    (["--defense", "dp-fedavg:epsilon=1,delta=1"], "delta is 1; it must be below 1"),
    (["--defense", "secagg:least=1"], "defense secagg: least is 1"),
    (["--defense", "secagg:least=9"], "adds up 9 uploads or more; a cohort has 4"),
    (["--defense", "secagg", "--capture-rounds", "0"], "no upload of a client to capture"),
    (["--defense", "clip", "--defense", "clip:bound=2"], "--defense clip is given twice"),
    (["--defense", "gaussian", "--defense", "dp-fedavg:epsilon=1"], "cannot be combined with --defense gaussian"),
    (["--defense", "dp-sgd:epsilon=1", "--defense", "dp-fedavg:epsilon=1"], "each state an epsilon of its own"),
    (["--defense", "clip", "--defense", "dp-sgd:epsilon=1"], "write them so: --defense dp-sgd --defense clip"),
    (["--algo", "fedproto", "--defense", "dp-fedavg:noise_multiplier=1"], "fedproto cannot be trained under dp-fedavg"),
    (["--model", "cnn-bn", "--defense", "clip"], "Use --buffers local or frozen"),
    (["--set", "mu"], "--set 'mu' is not of the form NAME=VALUE"),
    (["--set", "=1"], "not of the form NAME=VALUE"),
    (["--set", "mu="], "not of the form NAME=VALUE"),
    (["--algo", "fedprox", "--set", "mu=1", "--set", "mu=1"], "--set gives mu twice"),
    (["--algo", "fedprox", "--set", "muu=1"], "did you mean mu?"),
    (["--algo", "fedprox", "--set", "mu=-1"], "mu is -1"),
    (["--algo", "fedprox", "--set", "mu=nan"], "mu is nan"),
    (["--algo", "fedprox", "--set", "mu=1e999"], "mu is inf"),
    (["--algo", "fedprox", "--set", "mu=big"], "mu is 'big'"),
    (["--preset", "papr"], "did you mean paper?"),
    (["--config", "missing.toml"], "missing.toml does not exist"),
    (["--config", "."], "cannot be read"),
    (["--config", LONG], "cannot be read"),
    (["--name", ""], "run name '' is not usable"),
    (["--name", ".."], "run name '..' is not usable"),
    (["--name", "a/b"], "run name 'a/b' is not usable"),
    (["--name", "/tmp/x"], "run name '/tmp/x' is not usable"),
    (["--name", "a\nb"], "run name 'a b' is not usable"),
    (["--name", LONG], "at most 100"),
    (["--resume", "nothing"], "run 'nothing' does not exist"),
    (["--rnds", "3"], "--rounds"),
    (["surplus"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("words", "says"), TRAINING, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "")
def test_a_mistake_in_a_training_is_one_line_and_leaves_nothing(cli: Cli, tmp_path: Path, words: list[str], says: str):
    common = [] if "--resume" in words else TRAIN[1:]
    assert says in cli.mistake("train", *common, *words)
    assert tree(tmp_path) == {}


ATTACK = [
    (["dgl"], "did you mean dlg?"),
    ([""], "attack '' is not known"),
    (["dlg,"], "attack '' is not known"),
    (["all,dlg"], "attack 'all' is not known"),
    (["dlg", "fedavgg"], "Runs in runs: fedavg, fedrep"),
    (["dlg", ""], "run '' is not usable"),
    (["dlg", ".."], "run '..' is not usable"),
    (["dlg", "runs/nothing"], "does not exist"),
    (["dlg", "/nowhere/at/all"], "does not exist"),
    (["dlg", LONG], "at most 100"),
    (["dlg", "fedavg", "surplus"], "unexpected extra argument"),
    (["ig", "--set", "tv=-1"], "tv is -1"),
    (["ig", "--set", "lr=nan"], "lr is nan"),
    (["ig", "--set", "tv"], "not of the form NAME=VALUE"),
    (["ig", "--set", "tv=1", "--set", "tv=1"], "--set gives tv twice"),
    (["ig", "--set", "tvv=1"], "did you mean tv?"),
    (["ig", "--set", "signed=perhaps"], "signed is 'perhaps'"),
    (["ig", "--iterations", "0"], "iterations is 0"),
    (["ig", "--iterations", "nan"], "--iterations"),
    (["ig", "--iterations", "3", "--set", "iterations=4"], "iterations is given twice"),
    (["ig", "--restarts", "0"], "restarts is 0"),
    (["ig", "--restarts", "-1"], "restarts is -1"),
    (["ig", "--labels", "known"], "--knowledge wire+labels"),
    (["ig", "--labels", "unknown"], "labels is 'unknown'"),
    (["ig", "--hidden", "oracle"], "--knowledge wire+personal_params"),
    (["ig", "--hidden", "x"], "hidden is 'x'"),
    (["ig", "--adversary", "eavesdropper"], "--knowledge wire+hyper"),
    (["ig", "--adversary", "client", "--labels", "known"], "--knowledge wire+labels"),
    (["imprint"], "--adversary malicious-server"),
    (["ig", "--knowledge", "wire+downlink"], "--adversary malicious-server"),
    (["ig", "--threat-model", "Z"], "threat model 'Z' is not known"),
    (["ig", "--threat-model", "D"], "no attack here uses data from elsewhere"),
    (["ig", "--threat-model", "C", "--adversary", "server"], "leave --adversary out"),
    (["ig", "--threat-model", "A"], "--knowledge wire+hyper"),
    (["ig", "--adversary", "sever"], "did you mean server?"),
    (["ig", "--knowledge", "wire+lables"], "did you mean labels?"),
    (["ig", "--knowledge", "oracel"], "Use wire, oracle"),
    (["ig", "--rounds", "1"], "it has: rounds 0, clients 0, 1"),
    (["ig", "--rounds", "-1"], "--rounds has '-1'"),
    (["ig", "--rounds", "0,"], "--rounds has ''"),
    (["ig", "--rounds", "²"], "--rounds has '²'"),
    (["ig", "--rounds", HUGE], "which is no number >= 0"),
    (["ig", "--clients", "2"], "it has: rounds 0, clients 0, 1"),
    (["ig", "--kind", "updates"], "kind is 'updates'"),
    (["ig", "--kind", "update"], "it has: rounds 0, clients 0, 1, kind probe"),
    (["ig", "--seed", "-1"], "seed is -1"),
    (["ig", "--workers", "0"], "workers is 0"),
    (["ig", "--executor", "threads"], "executor is 'threads'"),
    (["ig", "--lpips", "resnet"], "lpips is 'resnet'"),
    (["ig", "--lpips-weights", "missing.pth"], "missing.pth cannot be read"),
    (["ig", "--lpips-weights", "."], "cannot be read"),
    (["ig", "--lpips-weights", "runs/fedavg/run.json"], "is not torchvision's"),
    (["ig", "--lpips", "none", "--lpips-weights", "x"], "has no use with --lpips none"),
    (["ig", "--iteration", "3"], "--iterations"),
]


@pytest.mark.parametrize(("words", "says"), ATTACK, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "")
def test_a_mistake_in_an_attack_is_one_line_and_leaves_nothing(cli: Cli, runs: Path, words: list[str], says: str):
    before = tree(runs)
    assert says in cli.mistake("attack", *words)
    assert tree(runs) == before


OTHERS = [
    (["trian"], "Did you mean 'train'?"),
    (["--verbose"], "--verbose"),
    (["list"], "Missing argument 'WHAT'"),
    (["list", "algorithm"], "did you mean algorithms?"),
    (["show"], "Missing argument 'NAME'"),
    (["show", "fedravg"], "did you mean fedavg?"),
    (["show", ""], "name '' is not known"),
    (["show", "../fedavg/x"], "is not known"),
    (["show", "/etc"], "is not known"),
    (["show", LONG], "is not known"),
    (["report", "nothing"], "run 'nothing' does not exist"),
    (["report", LONG], "at most 100"),
    (["report", "--out"], "requires an argument"),
    (["attack"], "Missing argument 'ATTACKS'"),
    (["attack", "dlg"], "there is no run in runs"),
    (["report"], "there is no run in runs"),
]


@pytest.mark.parametrize(("words", "says"), OTHERS, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "")
def test_a_mistake_in_any_other_command_is_one_line(cli: Cli, tmp_path: Path, words: list[str], says: str):
    assert says in cli.mistake(*words)
    assert tree(tmp_path) == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = [", "cannot be read"),
        ("rounds = 1\nroundz = 3", "has no setting 'roundz'; did you mean rounds?"),
        ("lr = -1", "lr is -1"),
        ("lr = nan", "lr is nan"),
        ("settings = 3", "settings is 3; it must be a table"),
        ("algo = 5", "algorithm '5' is not known"),
        ("rounds = 2020-01-01", "rounds is"),
        ("settings = { mu = 1 }", "has no setting 'mu'"),
        ("defense = 'x'", "defense is 'x'"),
        ("[train]\nrounds = 3", "has no setting 'train'"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--seed", "3"]], ids=["alone", "with options"])
def test_a_mistake_in_a_file_names_the_file(cli: Cli, tmp_path: Path, text: str, says: str, more: list[str]):
    tmp_path.joinpath("grid.toml").write_text(text)
    said = cli.mistake("train", "--config", "grid.toml", *more)
    assert says in said
    assert "grid.toml" in said or "is not known" in said or "'mu'" in said
    assert tree(tmp_path) == {"grid.toml": text.encode()}


def test_a_file_that_is_no_text_is_refused(cli: Cli, tmp_path: Path):
    tmp_path.joinpath("grid.toml").write_bytes(b"\xff\xfe")
    assert "grid.toml cannot be read" in cli.mistake("train", "--config", "grid.toml")


@pytest.mark.parametrize("words", [TRAIN, (*TRAIN, "--dry-run")])
def test_a_file_where_the_runs_should_be_is_said_in_one_line(cli: Cli, tmp_path: Path, words: tuple[str, ...]):
    tmp_path.joinpath("runs").write_text("mine")
    if "--dry-run" in words:
        cli.succeed(*words)
    else:
        assert "cannot write runs/fedavg-digits-s0" in cli.mistake(*words, announced=True)
    assert tree(tmp_path) == {"runs": b"mine"}


def test_a_file_where_attacks_should_be_is_noticed_before_the_work(
    cli: Cli, runs: Path, monkeypatch: pytest.MonkeyPatch
):
    runs.joinpath("fedavg/attacks").rmdir()
    runs.joinpath("fedavg/attacks").write_text("mine")
    monkeypatch.setattr("pflsec.runtime.attacking.attempt", None)
    assert "cannot write runs/fedavg/attacks" in cli.mistake("attack", "ig", "fedavg", *QUICK, announced=True)
    assert runs.joinpath("fedavg/attacks").read_text() == "mine"


def test_a_fault_of_ours_is_called_ours_and_shown_in_full(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pflsec.core.registry.names", None)
    result = cli("list", "algorithms")
    assert result.code == 1
    assert "Traceback" in result.err
    assert "this is a fault of pflsec, not yours" in result.err


def test_training_that_blows_up_is_named_with_round_client_and_item(cli: Cli, tmp_path: Path):
    result = cli(*TRAIN, "--lr", "1e30", "--name", "wild")
    assert result.code == 1
    assert "Traceback" not in result.err
    last = result.err.splitlines()[-1]
    assert last.startswith("error: round 0, client 0: 'body.fc1.weight' of the upload is not finite")
    assert "Lower --lr" in last
    assert '"state": "failed"' in tmp_path.joinpath("runs/wild/run.json").read_text()
