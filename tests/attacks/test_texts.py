"""Texts: the rows of the table give the words away, whatever stands behind; and nothing else does."""

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec import api
from pflsec.attacks.analytic.embedding_rows import by_text, whole_counts
from pflsec.core.attack import Reconstruction
from pflsec.core.errors import NotApplicable
from pflsec.core.tensors import read_items
from pflsec.data.datasets import Dataset, load
from pflsec.leakage.texts import assign, bag
from tests import toys
from tests.attacks.test_controls import noisy, shuffled
from tests.attacks.victims import Victim, attack, victim

DATA = toys.texts()


def text_victim(key: str = "fedavg", data: Dataset = DATA, **options: Any) -> Victim:
    return victim(key, data=data, net=toys.bag(data), **{"model": "bag", **options})


def words(found: Reconstruction, i: int = 0) -> Counter[int]:
    assert found.x is not None
    return bag(found.x[i])


@pytest.mark.parametrize("key", ["fedavg", "fedrep", "fedper", "ditto", "moon"])
@pytest.mark.parametrize("steps", [1, 3])
def test_every_word_of_a_text_is_found_as_often_as_it_is_there(key: str, steps: int):
    """Also where the head is hidden (fedrep, fedper): the common vector of the rows needs no head."""
    for first in range(4):
        v = text_victim(key, first=first, steps=steps)
        found = attack("embedding-rows", v.capture())
        assert found.status == "converged"
        assert words(found) == bag(v.x[0])


def test_the_label_is_read_by_rule_where_the_head_is_sent_and_missing_where_not():
    v = text_victim()
    assert attack("embedding-rows", v.capture()).y == v.y
    found = attack("embedding-rows", text_victim("fedrep").capture())
    assert (found.y, found.labels) == (None, "none")


def test_of_more_texts_than_can_be_told_apart_the_set_of_all_words_is_found():
    """Three vectors softmax - onehot of three classes lie in one plane: a word of all texts could be of any."""
    v = text_victim(batch=3)
    found = attack("embedding-rows", v.capture())
    assert found.x is not None
    assert len(found.x) == 3
    assert found.y is None
    assert "3 texts share the rows" in found.note
    for i in range(3):
        assert sorted(words(found, i)) == sorted(set(v.x[v.x != 0].tolist()))


@pytest.mark.parametrize("key", ["fedavg", "fedrep"])
def test_two_texts_of_different_classes_are_told_apart_word_by_word(key: str):
    """The words of one text alone have rows along its direction; a word of both lies between."""
    for first in range(3):
        v = text_victim(key, first=first, batch=2)
        found = attack("embedding-rows", v.capture())
        assert found.x is not None
        assert (found.status, found.note) == ("converged", "")
        order = assign(v.x, found.x)
        assert [words(found, j) for j in order] == [bag(text) for text in v.x]


def test_rows_between_two_directions_are_shared():
    """Text 1: a a b c; text 2: d e c, c its last third. Rows by hand: 2/4 u, 1/4 u, 1/4 u + 1/3 v, 1/3 v, 1/3 v."""
    u, w = torch.tensor([1.0, 0.2, 0.0]).double(), torch.tensor([-0.3, 1.0, 0.5]).double()
    counts = torch.tensor([[2 / 4, 0], [1 / 4, 0], [1 / 4, 1 / 3], [0, 1 / 3], [0, 1 / 3]]).double()
    found = by_text(counts @ torch.stack([u, w]), 2, 1e-6)
    assert found is not None
    shares = found[0] / found[0].amax(0)
    one, other = counts[:, 0] / counts[:, 0].max(), counts[:, 1] / counts[:, 1].max()
    swapped = bool(shares[0, 0] < shares[0, 1])
    assert torch.allclose(shares, torch.stack([other, one] if swapped else [one, other], 1), atol=1e-6)
    assert found[1] < 1e-12


def test_rows_that_do_not_tell_the_texts_apart_say_so():
    u = torch.tensor([1.0, 0.2, 0.0]).double()
    assert by_text(torch.stack([u, 2 * u, 3 * u]), 2, 1e-6) is None
    assert by_text(torch.eye(3).double(), 2, 1e-6) is None


@pytest.mark.parametrize("other", [shuffled, noisy])
def test_a_message_that_says_nothing_gives_no_text(other):
    """Not one multiset of four is found, and the objective says so."""
    for first in range(4):
        v = text_victim(first=first)
        found = attack("embedding-rows", other(v).capture())
        assert found.status == "budget"
        assert words(found) != bag(v.x[0])
        assert found.objective > 100 * attack("embedding-rows", v.capture()).objective


def test_another_texts_message_gives_the_other_text():
    v, w = text_victim(first=0), text_victim(first=1)
    assert words(attack("embedding-rows", v.with_upload(w.record.up).capture())) == bag(w.x[0])


@pytest.mark.parametrize("counts", [[1, 1, 2, 3], [2, 3], [3, 4, 3], [1], [2, 5, 5]], ids=str)
def test_counts_are_the_smallest_whole_multiples(counts: list[int]):
    u = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64)
    rows = torch.tensor(counts)[:, None] * u / 7
    found, left = whole_counts(rows, 32, 8)
    assert found.tolist() == counts
    assert left < 1e-20


def test_counts_with_a_common_factor_are_found_without_it():
    assert whole_counts(torch.tensor([[2.0], [4.0]]), 32, 8)[0].tolist() == [1, 2]


def test_counts_beyond_the_length_of_a_text_are_not_believed():
    """7 and 8 sevenths of a unit need 15 places; with 8 places the words are taken once each, and what is left says so."""
    rows = torch.tensor([[7.0, 0.0], [8.0, 0.0]], dtype=torch.float64)
    assert whole_counts(rows, 15, 8)[0].tolist() == [7, 8]
    found, left = whole_counts(rows, 8, 8)
    assert found.tolist() == [1, 1]
    assert left > 1e-3


@pytest.mark.parametrize(
    ("key", "reason"), [("local", "nothing that the client sends"), ("fedproto", "no gradient of a table")]
)
def test_without_a_table_on_the_wire_the_attack_does_not_apply(key: str, reason: str):
    with pytest.raises(NotApplicable, match=reason):
        attack("embedding-rows", text_victim(key).capture())


def test_images_have_no_words():
    with pytest.raises(NotApplicable, match="the inputs are images, and this attack searches for words"):
        attack("embedding-rows", victim().capture())


@pytest.mark.parametrize("name", ["dlg", "idlg", "inverting-gradients"])
def test_attacks_on_pixels_do_not_apply_to_texts(name: str):
    with pytest.raises(NotApplicable, match="the inputs are texts, and this attack searches for pixels"):
        attack(name, text_victim().capture())


def test_the_replay_of_the_true_tokens_is_what_was_sent():
    v = text_victim(batch=2, steps=2)
    cap = v.capture()
    soft = torch.nn.functional.one_hot(v.x, 30).double()
    for x in (v.x, soft):
        again = cap.replay(x, v.y, {})
        for name, seen in cap.target.items():
            assert float((again[name].detach() - seen).norm() / seen.norm()) < 1e-4


@pytest.fixture
def run(tmp_path: Path) -> api.Run:
    return api.train(dataset=DATA, partition="natural", test="given", rounds=1, capture_clients="1,3", victims=2,
                     capture_rounds="0", runs_dir=tmp_path, name="texts")  # fmt: skip


@pytest.mark.parametrize(
    ("batch", "works"), [(1, {"embedding-rows", "tag"}), (3, {"embedding-rows", "tag", "membership"})]
)
def test_every_attack_works_on_texts_or_says_why_not(batch: int, works: set[str], tmp_path: Path):
    """Under the most that can be granted: whatever an attack looks at, tokens are no pixels. No test text is of the class of
    either single victim, so there is nobody to tell it from."""
    run = api.train(dataset=DATA, partition="natural", test="given", rounds=1, capture_clients="1,3", victims=1,
                    victim_batch=batch, runs_dir=tmp_path)  # fmt: skip
    scores = api.attack(run, "all", knowledge="oracle", lpips="none", controls=False)
    assert isinstance(scores, list)
    found = {one.table["attack"].iloc[0]: one.table for one in scores}
    assert {name for name, table in found.items() if set(table["status"]) != {"not-applicable"}} == works
    for table in found.values():
        assert all(
            reason
            for status, reason in zip(table["status"], table["reason"], strict=True)
            if status == "not-applicable"
        )


def found_texts(scores: api.Scores) -> dict[str, Tensor]:
    return read_items(scores.path / "reconstructions.safetensors", "reconstructions")


def test_a_run_is_attacked_and_scored_by_words(run: api.Run):
    scores = api.attack(run, "embedding-rows", lpips="none")
    assert isinstance(scores, api.Scores)
    assert scores.table["psnr"].isna().all()
    assert set(scores.table["reason"]) == {"texts have no image measures: see tokens.csv"}
    assert set(scores.table["ssim_variant"]) == set(scores.table["lpips_status"]) == {"no-image"}
    assert scores.table["identified"].tolist() == scores.table["label_correct"].tolist() == [1] * 4
    assert scores.table["attack_valid"].all()
    assert scores.tokens["multiset_exact"].tolist() == [1] * 4
    assert scores.tokens["capture"].is_unique
    assert (scores.tokens["recall_blind"] < 1).all()


def test_where_an_attack_does_not_apply_the_reason_is_the_attacks(run: api.Run):
    scores = api.attack(run, "dlg", lpips="none")
    assert isinstance(scores, api.Scores)
    assert set(scores.table["status"]) == {"not-applicable"}
    assert all(reason.startswith("the inputs are texts") for reason in scores.table["reason"])
    assert scores.tokens["token_recall"].isna().all()
    assert scores.tokens["identified"].isna().all()


def test_without_the_vault_the_same_words_are_found(run: api.Run):
    scores = api.attack(run, "embedding-rows", lpips="none")
    assert isinstance(scores, api.Scores)
    before = found_texts(scores)
    shutil.rmtree(run.path / "vault")
    again = api.attack(run, "embedding-rows", lpips="none")
    assert isinstance(again, api.Scores)
    assert toys.same(found_texts(again), before)
    assert set(again.table["reason"]) == {"not scored: the run has no vault"}
    assert not (again.path / "tokens.csv").exists()


@pytest.mark.parametrize("key", ["fedavg", "fedrep", "fedper"])
def test_eight_texts_of_ag_news_are_found_word_by_word(key: str, shared_data: Path):
    data = load(f"text:{shared_data / 'ag_news' / 'test.csv'}")
    for first in range(8):
        v = text_victim(key, data, client=1, first=first, partition="iid", test="split", clients=20)
        found = attack("embedding-rows", v.capture())
        assert words(found) == bag(v.x[0])
        assert found.status == "converged"
