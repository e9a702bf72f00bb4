"""Figures: what they say, that they repeat bit by bit, and that damage is named."""

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text

from pflsec.core.errors import RunError
from pflsec.core.files import write_text
from pflsec.core.tensors import read_items, write_items
from pflsec.reports import figures
from pflsec.reports.frontier import measure
from pflsec.reports.load import load_run, load_runs
from tests.reports.runs import CAPTURES, not_applicable, score, truth, write_attack, write_run


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "fedrep")


def texts(figure: Figure) -> list[str]:
    """Return everything that a figure says."""
    found = [artist.get_text() for artist in figure.findobj(Text) if isinstance(artist, Text)]
    return [text for text in found if text]


def images(figure: Figure) -> list[np.ndarray]:
    """Return all pictures in a figure, row by row."""
    return [np.asarray(artist.get_array()) for artist in figure.findobj(AxesImage) if isinstance(artist, AxesImage)]


def gallery_of(path, rows, **changes):
    write_attack(path, rows, **changes)
    loaded = load_run(path)
    return figures.gallery(loaded, loaded.attacks[0])


def test_the_gallery_shows_original_reconstruction_and_blind_guess(run):
    figure = gallery_of(run, [score(run, c) for c in CAPTURES[:3]])
    shown = images(figure)
    assert len(shown) == 9
    originals = [truth(run, c)[0, 0].numpy() for c in CAPTURES[:3]]
    assert min(np.abs(shown[0] - original).max() for original in originals) < 1e-6
    assert 0 < np.abs(shown[1] - shown[0]).max() < 0.2
    np.testing.assert_array_equal(shown[2], np.full((8, 8), 0.5))
    assert {"original", "reconstruction", "blind guess"} <= set(texts(figure))
    smoothing = {artist.get_interpolation() for artist in figure.findobj(AxesImage) if isinstance(artist, AxesImage)}
    assert smoothing == {"nearest"}


def test_captions_give_psnr_ssim_and_labels(run):
    """A reconstruction that is 0.1 off everywhere has 20 dB, whatever the scores say."""
    rows = [score(run, CAPTURES[0], label_true="1", label_found="1"), score(run, CAPTURES[1], label_found="5")]
    folder = write_attack(run, rows)
    write_text(folder / "images.csv", f"capture,position,ssim\n{CAPTURES[0]},0,0.875\n{CAPTURES[1]},0,\n")
    first, second = (truth(run, c) for c in CAPTURES[:2])
    images = {CAPTURES[0]: first + torch.where(first < 0.5, 0.1, -0.1), CAPTURES[1]: second}
    write_items(folder / "reconstructions.safetensors", images)
    said = texts(figures.gallery(load_run(run), load_run(run).attacks[0]))
    assert {"20.0 dB, SSIM 0.88", "label found 1", "exact", "label found 5 (wrong)"} <= set(said)


def test_the_worst_leak_comes_first_and_failures_last(run):
    rows = [score(run, c) for c in CAPTURES[:3]]
    rows[1] |= {"status": "nonfinite"}
    folder = write_attack(run, rows)
    off = {CAPTURES[0]: 0.1, CAPTURES[1]: 0.0, CAPTURES[2]: 0.01}
    found = {c: truth(run, c) + torch.where(truth(run, c) < 0.5, d, -d) for c, d in off.items()}
    write_items(folder / "reconstructions.safetensors", found)
    said = texts(figures.gallery(load_run(run), load_run(run).attacks[0]))
    assert [t for t in said if ("dB" in t and "blind" not in t) or "exact" in t] == [
        "40.0 dB",
        "20.0 dB",
        "nonfinite: exact",
    ]


def test_only_the_ten_worst_leaks_are_drawn_and_the_rest_is_counted(tmp_path):
    run = write_run(tmp_path / "many", batch=3, shape=(3, 28, 28))
    rows = [score(run, c, batch=3, label_true="0 1 2", label_found="0 1 2") for c in CAPTURES[:8]]
    figure = gallery_of(run, rows)
    assert len(images(figure)) == 3 * 10
    assert images(figure)[0].shape == (28, 28, 3)
    assert any("10 of 24 images, 14 left out" in text for text in texts(figure))


def test_signals_are_drawn_as_curves_for_the_first_channels(tmp_path):
    run = write_run(tmp_path / "har", shape=(9, 1, 32))
    figure = gallery_of(run, [score(run, c) for c in CAPTURES[:2]])
    assert images(figure) == []
    assert len(figure.axes) == 2 * 3
    for axes in figure.axes:
        blind, true, found = (np.asarray(line.get_ydata()) for line in axes.get_lines())
        assert true.shape == (32,)
        assert 0 < np.abs(true - found).max() < 0.2
        np.testing.assert_array_equal(blind, np.full(32, 0.5))
    said = " ".join(texts(figure))
    for words in ("3 of 9 channels", "channel 0", "channel 2", "original", "reconstruction", "blind guess"):
        assert words in said


def test_not_applicable_victims_have_no_column(run):
    rows = [score(run, CAPTURES[0]), not_applicable(run, CAPTURES[1], "nothing is sent")]
    assert len(images(gallery_of(run, rows))) == 3
    alone = gallery_of(run, [not_applicable(run, c, "nothing is sent") for c in CAPTURES])
    assert images(alone) == []
    assert texts(alone) == ["fedrep, dlg: no reconstruction to show"]


def test_damaged_reconstructions_and_vaults_are_named(run):
    rows = [score(run, c) for c in CAPTURES[:2]]
    folder = write_attack(run, rows)
    attack = load_run(run).attacks[0]
    write_items(folder / "reconstructions.safetensors", {CAPTURES[0]: torch.rand(1, 1, 9, 9)})
    with pytest.raises(RunError, match=r"its reconstruction \[1, 1, 9, 9\]"):
        figures.gallery(load_run(run), attack)
    (folder / "reconstructions.safetensors").write_bytes(b"rubbish")
    with pytest.raises(RunError, match="reconstructions of attack 'dlg-1a2b3c4d' is damaged"):
        figures.gallery(load_run(run), attack)
    write_attack(run, rows)
    pool = read_items(run / "vault" / "pool.safetensors", "")
    write_items(run / "vault" / "pool.safetensors", {"images": pool["images"]})
    with pytest.raises(RunError, match="vault is damaged: the mean image"):
        figures.gallery(load_run(run), attack)


def test_write_gallery_puts_the_picture_beside_the_scores(run):
    write_attack(run, [score(run, c) for c in CAPTURES[:2]])
    path = figures.write_gallery(run, "dlg-1a2b3c4d")
    assert path == run / "attacks" / "dlg-1a2b3c4d" / "gallery.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunError, match=r"no attack 'dlg-0'. It has: dlg-1a2b3c4d"):
        figures.write_gallery(run, "dlg-0")


def test_learning_curves_name_every_run_whatever_its_name(tmp_path):
    paths = [write_run(tmp_path / name, captures=()) for name in ("_hidden", r"$\frac{1}$", "plain")]
    said = texts(figures.accuracy_curves(load_runs(paths)))
    assert {" _hidden", r" $\frac{1}$", " plain", " worst tenth of the clients"} <= set(said)


def test_without_data_a_figure_is_a_sentence(tmp_path):
    runs = load_runs([write_run(tmp_path / "young", accuracies=())])
    assert texts(figures.frontier(measure(runs))) == ["No run has both coordinates"]
    assert texts(figures.accuracy_curves(runs)) == ["No run has a tested round"]
    assert texts(figures.loss_curves(runs)) == ["No run has recorded a training loss"]
    assert texts(figures.epsilon_curves(runs)) == ["No run is differentially private"]


def test_equal_figures_give_equal_files(run, tmp_path):
    write_attack(run, [score(run, c) for c in CAPTURES[:2]])
    loaded = load_runs([run])
    frontier = lambda runs: figures.frontier(measure(runs))  # noqa: E731
    for name, draw in (("f", frontier), ("a", figures.accuracy_curves), ("l", figures.loss_curves)):
        first, second = (figures.save(draw(loaded), tmp_path / f"{name}{i}") for i in range(2))
        assert [p.suffix for p in first] == [".png", ".svg", ".pdf"]
        assert [p.read_bytes() for p in first] == [p.read_bytes() for p in second]
        assert b"<dc:date>" not in first[1].read_bytes()
    one, two = (figures.encode(figures.gallery(loaded[0], loaded[0].attacks[0]), "svg") for _ in range(2))
    assert one == two


def test_drawing_leaves_matplotlibs_settings_alone(run, tmp_path):
    before = dict(mpl.rcParams)
    figures.save(figures.accuracy_curves(load_runs([run])), tmp_path / "c")
    assert dict(mpl.rcParams) == before


def test_psnr_by_hand():
    """0.1 off everywhere is 20 dB, equal images are 100 dB."""
    image = np.full((1, 4, 4), 0.5)
    assert figures.psnr(image, image + 0.1) == pytest.approx(20.0)
    assert figures.psnr(image, image) == 100.0
