"""The page: what it says, that it needs nothing else, trusts nothing, and shows no image that was to be left out."""

import base64
import csv
import hashlib
import json
import re
import shlex
import shutil
from html.parser import HTMLParser

import pytest

from pflsec.core.errors import RunError
from pflsec.core.files import read_json, write_json
from pflsec.reports.commands import commands
from pflsec.reports.load import load_run
from pflsec.reports.page import write
from tests.reports.runs import CAPTURES, MISSING, not_applicable, score, without_scripts, write_attack, write_run


class Seen(HTMLParser):
    """A page's elements with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data):
        self.words.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def seen(page) -> Seen:
    return Seen(page.read_text(encoding="utf8"))


def change(path, **changes):
    write_json(path / "run.json", read_json(path / "run.json", "") | changes)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A report of two runs: one leaks, one cannot be attacked by idlg."""
    home = tmp_path_factory.mktemp("runs")
    rep, avg = write_run(home / "rep"), write_run(home / "avg", algo="fedavg", common=0.4)
    write_attack(rep, [score(rep, c) for c in CAPTURES])
    write_attack(rep, [score(rep, c, knowledge="oracle", hidden="oracle", psnr=45.0) for c in CAPTURES[:2]], number="2")
    write_attack(avg, [not_applicable(avg, c, "no layer's bias is sent", "idlg") for c in CAPTURES], "idlg")
    return write([rep, avg], home / "out")


def test_the_page_needs_no_network_and_no_other_file(report):
    page = seen(report)
    assert not page.all("link")
    for tag, attributes in page.elements:
        for name in ("src", "srcset", "data", "action", "poster", "xlink:href"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, name)
        assert re.match(r"#|tables/", attributes.get("href", "#")), tag
        assert not any(name.startswith("on") for name in attributes)
    text = without_scripts(report.read_text())
    assert "@import" not in text
    assert "url(" not in text
    for attributes in page.all("img"):
        kind, _, data = attributes["src"].partition(";base64,")
        assert base64.b64decode(data).startswith(b"\x89PNG" if kind == "data:image/png" else b"<?xml")


def test_only_the_scripts_that_stand_in_the_page_may_run(report):
    """The page's own policy names them by their hashes and lets nothing be loaded or sent; plotly is there once."""
    (policy,) = (a["content"] for a in seen(report).all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    scripts = re.findall(r"<script>(.*?)</script>", report.read_text(encoding="utf8"), flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 2
    assert "plotly.js v" in scripts[0][:200]
    assert "plotly.js v" not in scripts[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["script-src"] == " ".join(f"'sha256-{value}'" for value in hashes)
    assert [rules[name] for name in ("default-src", "form-action", "base-uri")] == ["'none'"] * 3
    assert rules["img-src"] == "data: blob:"


def test_the_page_is_well_made(report):
    page = seen(report)
    assert len(page.all("h1")) == 1
    assert page.all("html")[0]["lang"] == "en"
    assert all(len(attributes["alt"]) > 20 for attributes in page.all("img"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    linked = {attributes["href"][1:] for attributes in page.all("a") if attributes["href"][0] == "#"}
    assert linked == {i for i in ids if not re.search(r"-table(-\d)?$", i)}
    assert {a["data-table"] for a in page.all("form")} == {"leakage-table"} <= set(ids)
    assert {"summary", "frontier", "leakage", "accuracy", "galleries", "wire", "privacy", "threats", "controls",
            "configuration", "repeat"} <= linked  # fmt: skip
    assert len(page.all("table")) == without_scripts(report.read_text()).count('<div class="scroll" ')


def test_the_page_says_what_was_found(report):
    text = seen(report).text
    for words_found in (
        "Worst case over rounds and victims, on what the wire shows: 30.0 dB by dlg (round 0, client 0, victim 0; a blind guess: "
        "12.0 dB). Over the 12 victims of that attack: mean 30.0 dB [30.0, 30.0]; 100.0 % [75.8 %, 100.0 %] reach 20 dB.",
        "There is no worst case: no attack on what the wire shows gave an image that counts.",
        "dlg: controls: not run (the attack is of a version without them).",
        "Mean personal accuracy is 70.0 % after 3 of 3 rounds; the worst tenth of the clients has 45.0 %.",
        "has 45.0 %, the global model 40.0 %.",
        "Worst attack on what the wire shows: dlg by the server, median PSNR 30.0 dB over 12 victims, on average "
        "18.0 dB above a blind guess (95 % interval 18.0 to 18.0); 100.0 % of the victims identified.",
        "With oracle knowledge, which goes beyond the wire: dlg by the server, median PSNR 45.0 dB",
        "Fewer than 20 victims: this illustrates, and supports no claim.",
        "No attack on what the wire shows gave an image.",
        "avg, idlg: not applicable to 12 of 12 victims: no layer's bias is sent.",
        "Never sent: head.*.",
        "private items are unknowns, optimised together with the data",
        "the server, which follows the protocol and reads all that it receives",
        "Probes were attacked (small batches), not the real uploads",
        "rep: messages of 3 of 4 clients were captured, in rounds 0, 2.",
        "n/a: weights-missing",
    ):
        assert words_found in text
    assert text.count(MISSING["remedy"]) == 1


def test_tables_and_figures_are_files_too(report):
    out = report.parent
    for name in (
        "headline",
        "frontier",
        "accuracy",
        "leakage",
        "leakage-by-round",
        "victims",
        "norms",
        "traffic",
        "wire",
        "configuration",
    ):
        rows = json.loads((out / "tables" / f"{name}.json").read_text(), parse_constant=pytest.fail)
        with (out / "tables" / f"{name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(rows) > 0
        assert "\\toprule" in (out / "tables" / f"{name}.tex").read_text()
    drawn = {path.name for path in (out / "figures").iterdir()}
    for name in ("frontier", "accuracy-by-round", "loss-by-round", "norms-by-round", "gallery-01-rep-dlg-1a2b3c4d"):
        assert {f"{name}.{kind}" for kind in ("png", "svg", "pdf")} <= drawn


def test_the_page_names_no_folder_of_this_machine(report):
    assert str(report.parents[1]) not in report.read_text()


def test_the_page_repeats_itself(tmp_path):
    run = write_run(tmp_path / "rep", captures=CAPTURES[:2])
    write_attack(run, [score(run, c) for c in CAPTURES[:2]])
    first, second = (write([run], tmp_path / name) for name in ("one", "two"))
    assert first.read_text() == second.read_text()


def test_names_and_reasons_are_text_and_never_markup(tmp_path):
    evil = "<script>alert(1)</script>"
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>", state="failed", reason=evil)
    manifest = read_json(run / "run.json", "")
    manifest["algorithm"] |= {"title": evil, "family": evil, "settings": {evil: evil}}
    manifest["data"] |= {"class_names": [evil] * 10, "name": evil}
    manifest["wire"][0] |= {"item": evil, "kind": evil}
    manifest["config"] |= {"data": evil, "defense": [evil]}
    write_json(run / "run.json", manifest)
    rows = [score(run, c, adversary=evil, hidden=evil, labels=evil) for c in CAPTURES[:5]]
    rows += [not_applicable(run, c, evil) for c in CAPTURES[5:]]
    lpips = {"name": evil, "status": evil, "remedy": evil}
    threat = {"adversary": evil, "knowledge": evil, "knows": [evil]}
    write_attack(run, rows, number=" onload=x", attack="dlg", lpips=lpips, threat_model=threat, title=evil)
    page = write([run], tmp_path / "out")
    found = seen(page)
    assert {a.get("type", "") for a in found.all("script")} == {"", "application/json"}
    assert sum("type" not in a for a in found.all("script")) == 2
    assert all(a["src"].startswith("data:") for a in found.all("img"))
    assert evil not in page.read_text()
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    assert found.text.count(evil) > 10
    for chart in re.findall(r'<script type="application/json">(.*?)</script>', page.read_text(), flags=re.DOTALL):
        assert "<" not in chart
        assert "<img" not in json.dumps(json.loads(chart))  # what plotly would take for markup


def test_without_originals_no_image_of_a_victim_is_needed_or_shown(tmp_path):
    run = write_run(tmp_path / "rep")
    folder = write_attack(run, [score(run, c) for c in CAPTURES[:3]])
    out = tmp_path / "out"
    with_pictures = seen(write([run], out))
    assert sum(a["src"].startswith("data:image/png") for a in with_pictures.all("img")) == 1
    # Nothing of it can be shown: it is not there any more.
    shutil.rmtree(run / "vault")
    (folder / "reconstructions.safetensors").unlink()
    without = seen(write([run], out, originals=False))
    assert not any(a["src"].startswith("data:image/png") for a in without.all("img"))
    assert "Pictures of the victims' images were left out on request" in without.text
    assert not list((out / "figures").glob("gallery*"))
    assert len(without.all("img")) == 4  # frontier, accuracy, loss, norms: where no script runs


def test_a_run_without_its_vault_still_has_a_page(tmp_path):
    run = write_run(tmp_path / "rep")
    write_attack(run, [score(run, c) for c in CAPTURES[:2]])
    shutil.rmtree(run / "vault")
    assert "The run's vault, which holds the originals, is not there" in seen(write([run], tmp_path / "out")).text


def test_a_run_without_attacks_says_how_to_attack_it(tmp_path):
    page = seen(write([write_run(tmp_path / "my run")], tmp_path / "out"))
    assert "No attack has been run, so nothing is known of what the messages give away." in page.text
    assert "pflsec attack dlg 'my run'" in page.text
    assert "No run has both an accuracy and a leakage." in page.text
    assert "my run: it has not been attacked" in page.text
    assert "No run is differentially private." in page.text
    assert "Nothing was attacked, so everything is open." in page.text


def test_a_run_without_captures_says_how_to_get_some(tmp_path):
    run = write_run(tmp_path / "rep", captures=())
    change(run, captures={"rounds": [], "clients": [], "victims": 4, "batch": 1, "steps": 1, "kind": "probe"})
    text = seen(write([run], tmp_path / "out")).text
    assert "captured no messages, so nothing can be attacked. Train it again with --capture-rounds" in text
    assert "pflsec attack" not in text


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("failed", "The run failed: round 0: item 'body' is not finite. To train it again, see How to repeat."),
        ("interrupted", "pflsec train --resume rep"),
        ("running", "The run has not been closed"),
    ],
)
def test_a_run_that_did_not_end_well_says_so(tmp_path, state, said):
    run = write_run(tmp_path / "rep", accuracies=(), state=state, reason="round 0: item 'body' is not finite")
    text = seen(write([run], tmp_path / "out")).text
    assert said in text
    assert "No round has been tested, so there is no accuracy." in text


def test_few_victims_are_too_few_for_an_interval(tmp_path):
    run = write_run(tmp_path / "rep")
    write_attack(run, [score(run, c) for c in CAPTURES[:4]])
    text = seen(write([run], tmp_path / "out", originals=False)).text
    assert "18.0 dB above a blind guess (n too small)" in text
    assert "100.0 % (n too small)" in text
    assert "nothing follows from this number alone" in text


def test_a_failed_control_and_victims_that_cannot_speak_stand_on_the_page_in_words(tmp_path):
    run = write_run(tmp_path / "rep")
    rows = [score(run, c) for c in CAPTURES[:3]]
    rows[2] |= {"attack_valid": False, "reason": "the gradient has vanished"}
    failed = {"verdict": "failed", "reason": "2.0 dB above a blind guess; 10 are needed"}
    write_attack(run, rows, controls={"positive": failed, "negative": {"verdict": "passed", "reason": "x"}})
    page = seen(write([run], tmp_path / "out", originals=False))
    assert "does not even rebuild an image that must leak (2.0 dB above a blind guess; 10 are needed)" in page.text
    assert (
        "rep, dlg: not valid for 1 of 3 victims, which is no sign of privacy: the gradient has vanished." in page.text
    )
    assert any(attributes.get("class") == "warn" for attributes in page.all("p"))


def test_what_does_not_rise_above_a_blind_guess_is_not_called_a_leak(tmp_path):
    run = write_run(tmp_path / "rep")
    write_attack(run, [score(run, c, psnr=12.0 + (i % 2) - 0.5) for i, c in enumerate(CAPTURES)])
    text = seen(write([run], tmp_path / "out", originals=False)).text
    assert "That is not distinguishable from a guess without any message" in text
    assert "the messages leak" not in text


def test_runs_that_differ_in_more_than_the_method_are_flagged(tmp_path):
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", accuracies=(0.5, 0.6))
    data = read_json(two / "run.json", "")["data"]
    change(two, data=data | {"partition": "other"})
    text = seen(write([one, two], tmp_path / "out")).text
    assert "Not everything is equal here: partition, number of rounds. Compare with care." in text
    assert "Where the runs differ" in text


def test_the_commands_hold_every_setting(tmp_path):
    run = write_run(tmp_path / "rep")
    config = read_json(run / "run.json", "")["config"]
    change(run, config=config | {"data": "npz:my file.npz", "defense": ["dp-sgd:epsilon=8", "prune:keep=0.1"]})
    write_attack(run, [score(run, c) for c in CAPTURES])
    train, attack, report = (shlex.split(line) for line in commands(load_run(run)).replace("\\\n", " ").splitlines())
    options = " ".join(train)
    assert train[:2] == ["pflsec", "train"]
    assert train[train.index("--data") + 1] == "npz:my file.npz"
    assert "--defense dp-sgd:epsilon=8 --defense prune:keep=0.1 --set head_epochs=10 --set head_lr=none" in options
    assert "--capture-rounds first,last" in options
    assert "--split" not in train
    assert train[-2:] == ["--name", "rep"]
    assert attack[:4] == ["pflsec", "attack", "dlg", "rep"]
    said = " ".join(attack)
    assert "--adversary server --knowledge wire --rounds 0,2 --clients 0,1,2 --kind probe" in said
    assert "--iterations 100 --restarts 8 --labels restore --hidden auto --set tv=1e-06 --lpips alex --seed 0" in said
    assert report == ["pflsec", "report", "rep"]


def test_the_commands_say_what_was_seen_and_known_and_nothing_empty(tmp_path):
    run = write_run(tmp_path / "rep")
    change(run, config=read_json(run / "run.json", "")["config"] | {"track": []})
    write_attack(run, [score(run, c) for c in CAPTURES], naive=True, visible=["head.*"])
    train, attack, _ = commands(load_run(run)).replace("\\\n", " ").splitlines()
    assert "--track" not in train
    assert "--visible 'head.*'" in attack
    assert "--naive" in attack


def test_damage_stops_the_report(tmp_path):
    run = write_run(tmp_path / "rep")
    (run / "run.json").write_text("{")
    with pytest.raises(RunError, match="damaged or truncated"):
        write([run], tmp_path / "out")
    with pytest.raises(RunError, match="at least one run"):
        write([], tmp_path / "out")


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    run = write_run(tmp_path / "rep")
    (tmp_path / "out").write_text("a file")
    with pytest.raises(RunError, match="cannot write"):
        write([run], tmp_path / "out")


def test_seeds_of_one_configuration_share_a_card_and_stand_in_one_headline(tmp_path):
    """12 victims at 30 dB with one seed, 12 at 40 with the other: worst 40, mean 35 over n = 24."""
    runs = [write_run(tmp_path / "zero"), write_run(tmp_path / "one")]
    for seed, (run, psnr) in enumerate(zip(runs, (30.0, 40.0), strict=True)):
        change(run, config=read_json(run / "run.json", "")["config"] | {"seed": seed})
        write_attack(run, [score(run, c, psnr=psnr) for c in CAPTURES])
    page = seen(write(runs, tmp_path / "out", originals=False))
    assert len(page.all("article")) == 1
    (row,) = json.loads((tmp_path / "out" / "tables" / "headline.json").read_text())
    assert (row["name"], row["seeds"], row["run"]) == ("fedrep (2 seeds)", 2, "one")
    assert (row["worst"], row["mean"], row["n"], row["clients"], row["note"]) == (40.0, 35.0, 24, 6, "")
    assert (row["low"], row["high"]) == (30.0, 40.0)  # seeds are drawn first, and within one all victims are alike
    assert "by dlg (one, round 0, client 0, victim 0; a blind guess: 12.0 dB)" in page.text
    assert "mean personal accuracy, ± SD over 2 seeds" in page.text


def test_a_run_of_which_no_single_upload_is_seen_shows_its_accuracy_and_why_nothing_else(tmp_path):
    run = write_run(tmp_path / "sums", captures=())
    config = read_json(run / "run.json", "")["config"] | {"defense": ["secagg"]}
    change(run, config=config, captures={"rounds": [], "clients": [], "reason": "only sums over 4 clients arrive"})
    text = seen(write([run], tmp_path / "out")).text
    assert "No single upload is seen: only sums over 4 clients arrive." in text
    assert "Mean personal accuracy is 70.0" in text
    (row,) = json.loads((tmp_path / "out" / "tables" / "frontier.json").read_text())
    assert (row["name"], row["x"], row["y"]) == ("sums", None, 0.7)
    assert row["reason"] == "no single upload is seen: only sums over 4 clients arrive"


def test_epsilon_is_shown_by_round_with_its_unit(tmp_path):
    run = write_run(tmp_path / "private")
    config = read_json(run / "run.json", "")["config"] | {"defense": ["dp-sgd:epsilon=8"]}
    change(run, config=config, dp={"enabled": True, "delta": {"most": 1e-5}, "guarantee": "formal", "test_seed": True})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    spent = [json.dumps(line | {"epsilon": 2.0 * (t + 1)}) + "\n" for t, line in enumerate(lines)]
    (run / "metrics.jsonl").write_text("".join(spent))
    page = seen(write([run], tmp_path / "out"))
    assert any("ending at private: 6.00 without a guarantee" in a.get("aria-label", "") for a in page.all("div"))
    assert "the noise was fixed for a test: no guarantee" in page.text
    assert (tmp_path / "out" / "figures" / "epsilon-by-round.pdf").exists()
