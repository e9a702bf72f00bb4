"""The grid that a file describes, and every mistake in it with its line."""

from pathlib import Path

import pytest

from pflsec.core.errors import ConfigError
from pflsec.sweep import file
from tests.audit.methods import LATE
from tests.audit.methods import write as write_method
from tests.sweep.grids import write

DEFENSES = 'rounds = 2\ndefense = [[], ["dp-sgd:noise_multiplier=1"]]\nseed = [0, 1]\n'


def test_lists_are_axes_and_settings_belong_to_their_method(tmp_path: Path):
    settings = '[settings.FedProx]\nmu = [0.1, 1]\n[[attack]]\nname = "ig"\nrestarts = 2\n[[attack]]'
    made = file.load(write(tmp_path, ('"fedrep"', '"fedprox"'), ("rounds = 2\n", DEFENSES), ("[[attack]]", settings)))
    assert made.axes == ("algo", "defense", "seed", "FedProx.mu")
    assert len(made.cells) == 2 * 2 + 2 * 2 * 2  # fedavg, and fedprox with each mu
    assert len({cell.fingerprint for cell in made.cells}) == 12
    assert len({cell.name for cell in made.cells}) == 12
    assert {tuple(cell.training.axes.items()) for cell in made.cells if cell.name == "fedprox-none-1-s0"} == {
        (("algo", "fedprox"), ("defense", "none"), ("seed", "0"), ("FedProx.mu", "1"))
    }
    found = {cell.name: cell.config for cell in made.cells}["fedprox-dp-sgd-noise_multiplier-1-0.1-s1"]
    assert found is not None
    assert (found.defense, found.seed, found.settings) == (["dp-sgd:noise_multiplier=1"], 1, {"mu": 0.1})
    assert [a.label.partition(" ")[0] for a in made.attacks] == ["inverting-gradients"] * 2
    assert len({a.label for a in made.attacks}) == 2


def test_a_list_of_defenses_is_one_value(tmp_path: Path):
    (cell,) = file.load(
        write(
            tmp_path, ('["fedavg", "fedrep"]', '"fedavg"'), ("rounds = 2", 'rounds = 2\ndefense = ["dp-sgd:epsilon=8"]')
        )
    ).cells
    assert cell.config is not None
    assert cell.config.defense == ["dp-sgd:epsilon=8"]


def test_what_a_method_refuses_is_not_applicable_and_no_mistake(tmp_path: Path):
    path = write(
        tmp_path, ('"fedrep"', '"fedproto"'), ("rounds = 2\n", 'rounds = 2\ndefense = [[], ["dp-sgd:epsilon=8"]]\n')
    )
    refused = {cell.name: cell.refused for cell in file.load(path).cells}
    assert [bool(reason) for reason in refused.values()] == [False, False, False, True]
    assert "fedproto cannot be trained under dp-sgd" in refused["fedproto-dp-sgd-epsilon-8-s0"]
    norms = write(tmp_path, ('"fedrep"', '"scaffold"'), ('"mlp"', '"cnn-bn"'))
    assert [bool(cell.refused) for cell in file.load(norms).cells] == [False, True]


def test_the_fingerprint_is_of_all_that_counts_and_of_nothing_else(tmp_path: Path):
    def marks(*changes: tuple[str, str]) -> list[str]:
        return [cell.fingerprint for cell in file.load(write(tmp_path, *changes)).cells]

    before = marks()
    assert marks(('name = "small"', 'name = "other"'), ("iterations = 2", "iterations = 3")) == before
    assert marks(("victims = 1", 'victims = 1\ndevice = "cpu"')) == before
    assert not set(marks(("rounds = 2", "rounds = 3"))) & set(before)
    assert not set(marks(("rounds = 2", "rounds = 2\nlr = 0.06"))) & set(before)
    name = write_method(tmp_path / "mine.py")
    own = marks(('"fedavg", "fedrep"', f'"{name}"'))
    write_method(tmp_path / "mine.py", LATE)
    assert marks(('"fedavg", "fedrep"', f'"{name}"')) != own


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "small"', 'nam = "small"', "line 1, column 1: a sweep has no setting 'nam'; did you mean name?"),
        ('name = "small"', 'name = "../out"', "line 1, column 1: sweep name '../out' is not usable as a folder name"),
        ('name = "small"', "name = 5", "line 1, column 1: a sweep: name is 5; it must be a valid string"),
        ('name = "small"', "", "s.toml: a sweep needs a name."),
        ("[train]", "[trian]", "line 2, column 2: a sweep has no setting 'trian'; did you mean train?"),
        ("rounds = 2", "round = 2", "line 7, column 1: train has no option 'round'; did you mean rounds?"),
        ("rounds = 2", "rounds = [2, 0]", "line 7, column 1: train: rounds is 0; it must be greater than or equal to 1"),
        ("rounds = 2", "lr = nan", "line 7, column 1: train: lr is nan"),
        ("rounds = 2", "seed = []", "line 7, column 1: seed is an empty axis"),
        ("rounds = 2", "seed = [0, 1, 0]", "line 7, column 1: seed has 0 twice"),
        ("rounds = 2", 'defense = ["dp-sdg"]', "line 7, column 1: train: defense is dp-sdg; defense 'dp-sdg' is not known; did"),
        ("rounds = 2", 'defense = ["dp-sgd:sigma=1"]', "line 7, column 1: training fedavg-s0: defense dp-sgd has no setting"),
        ("rounds = 2", 'defense = ["dp-sgd:epsilon=0"]', "line 7, column 1: training fedavg-s0: defense dp-sgd: epsilon is 0"),
        ("rounds = 2", 'defense = [[], "dp-sgd"]', "line 7, column 1: defense has lists and single values"),
        ("rounds = 2", 'workers = 2', "line 7, column 1: [train] takes no 'workers': say --workers on the command line"),
        ("rounds = 2", 'preset = 1', "line 7, column 1: train: preset is 1"),
        ("rounds = 2", "settings = {mu = 1}", "line 7, column 1: [train] takes no 'settings'"),
        ("rounds = 2", 'data = "npz:gone.npz"', "line 7, column 1: training fedavg-s0"),
        ("rounds = 2", 'track = "tensorbord"', "did you mean tensorboard"),
        ("rounds = 2", f"seed = {list(range(3000))}", "line 2, column 2: the grid has 6,000 trainings; at most 5,000"),
        ('"fedrep"', '"fedrepp"', "line 3, column 1: train: algo is fedrepp; algorithm 'fedrepp' is not known; did you mean"),
        ('"fedrep"', '"FedAvg"', "the trainings fedavg-s0-1 and fedavg-s0-2 are the same"),
        ('capture_rounds = "last"', 'capture_rounds = "9"', "line 8, column 1: training fedavg-s0: train: capture_rounds names"),
        ("[[attack]]", "[settings.fedprox]\nmu = 1\n[[attack]]", "line 11, column 11: settings of fedprox, which is no method"),
        ("[[attack]]", "[settings.fedrep]\nheads = 1\n[[attack]]", "line 12, column 1: fedrep has no setting 'heads'"),
        ("[[attack]]", "[settings.fedrep]\nhead_epochs = [1, -1]\n[[attack]]", "line 12, column 1: fedrep: head_epochs is -1"),
        ("[[attack]]", "[[attack]]\nname = 'dlg'\nrestart = 2\n[[attack]]", "line 13, column 1: attack has no option 'restart'"),
        ('name = "ig"', 'name = "igg"', "line 12, column 1: attack 'igg' is not known"),
        ('name = "ig"', "", "line 11, column 3: an [[attack]] needs the name of one attack"),
        ("iterations = 2", "iterations = 0", "line 13, column 1: attack inverting-gradients: iterations is 0"),
        ("iterations = 2", 'labels = "known"', "line 13, column 1: "),
        ("iterations = 2", 'kind = "update"', "line 11, column 3: attack inverting-gradients: no training has a capture of"),
        ("iterations = 2", "rounds = [0]", "line 11, column 3: attack inverting-gradients: no training has a capture of"),
        ("[[attack]]", '[[attack]]\nname = "analytic"\n[[attack]]\nname = "analytic"\n[[attack]]', "is given twice"),
        ("[[attack]]", "[attack]", "line 11, column 2: a sweep: attack is"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_its_place(tmp_path: Path, old: str, new: str, said: str):
    path = write(tmp_path, (old, new))
    with pytest.raises(ConfigError) as caught:
        file.load(path)
    text = str(caught.value)
    assert said in text
    assert text.startswith(str(path))
    assert len(text.splitlines()) == 1
