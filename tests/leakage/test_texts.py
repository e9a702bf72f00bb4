"""Scores of texts, by hand: multisets without padding, one assignment, identification by the nearest multiset."""

from itertools import combinations

import pytest
import torch

from pflsec.core.errors import RunError
from pflsec.core.vault import VaultWriter
from pflsec.leakage import texts
from pflsec.leakage.vault import Pool, Truth, Vault
from tests.leakage.test_vault import change

POOL = Pool(
    torch.tensor([[2, 3, 3, 4, 0], [5, 6, 1, 0, 0], [2, 3, 4, 4, 0], [7, 7, 7, 7, 7]]),
    torch.arange(4) + 100,
    torch.tensor([3, 3, 5, 0, 0]),
)


def truth(*rows: int) -> Truth:
    where = torch.tensor(rows)
    return Truth(POOL.images[where], where % 3, POOL.dataset_index[where], {}, 0.0)


def test_words_in_any_order_are_the_multiset_and_not_the_sequence():
    victim, (one,) = texts.score(truth(0), torch.tensor([[3, 4, 2, 3]]), torch.tensor([0]), POOL)
    assert (one.words, one.unknown, one.found) == (4, 0, 4)
    assert (one.token_recall, one.token_precision) == (1, 1)
    assert (one.set_exact, one.multiset_exact, one.sequence_exact, one.identified) == (1, 1, 0, 1)
    assert one.recall_blind == 2 / 4
    assert (victim.identified, victim.label_true, victim.label_found, victim.label_correct) == (1, "0", "0", 1)
    assert (victim.psnr, victim.mse, victim.psnr_blind, victim.ssim_variant) == (None, None, None, "no-image")


def test_the_same_order_is_the_sequence_whatever_the_padding():
    _, (one,) = texts.score(truth(1), torch.tensor([[5, 6, 1, 0, 0, 0, 0]]), None, POOL)
    assert (one.sequence_exact, one.unknown, one.label_found) == (1, 1, None)


def test_words_in_order_with_gaps_and_words_at_their_place():
    """True: 2 3 3 4. All of 3 3 4 is in it in order, and only the second word at its place."""
    for guess, longest, right in (
        ([3, 3, 4], 3, 1),
        ([2, 5, 3, 4], 3, 3),
        ([4, 3, 3, 2], 2, 2),
        ([2, 3, 3, 4], 4, 4),
        ([9], 0, 0),
    ):
        _, (one,) = texts.score(truth(0), torch.tensor([guess]), None, POOL)
        assert one.rouge_l == pytest.approx(2 * longest / (4 + len(guess))), guess
        assert one.in_place == right / 4, guess
    _, (none,) = texts.score(truth(0), None, torch.tensor([0]), POOL)
    assert (none.rouge_l, none.in_place) == (None, None)


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_common_subsequence_is_the_longest_of_all(seed: int):
    one, other = torch.randint(0, 3, (2, 7), generator=torch.Generator().manual_seed(seed)).tolist()
    shared = {s for n in range(8) for s in combinations(one, n)} & {s for n in range(8) for s in combinations(other, n)}
    assert texts.common_subsequence(one, other) == max(map(len, shared))


def test_missing_and_foreign_words_count_against_recall_and_precision():
    """True: 2 3 3 4; found: 2 3 9: two of four true words, two of three found ones."""
    _, (one,) = texts.score(truth(0), torch.tensor([[2, 3, 9]]), None, POOL)
    assert (one.token_recall, one.token_precision) == (2 / 4, 2 / 3)
    assert (one.set_exact, one.multiset_exact) == (0, 0)
    _, (other,) = texts.score(truth(0), torch.tensor([[2, 3, 4]]), None, POOL)
    assert (other.set_exact, other.multiset_exact) == (1, 0)


def test_the_nearest_text_by_counts_is_identified():
    """2 3 3 4 is 2 from the third text's 2 3 4 4 and 0 from its own; 2 3 4 4 points to the third, though three words fit."""
    for guess, hit in (([2, 3, 3, 4], 1), ([2, 3, 3], 1), ([2, 3, 4, 4], 0), ([7], 0)):
        _, (one,) = texts.score(truth(0), torch.tensor([guess]), None, POOL)
        assert one.identified == hit, guess


def test_a_copy_of_the_victim_in_the_pool_counts_as_the_victim():
    pool = Pool(torch.tensor([[3, 2, 4, 3, 0], [2, 3, 3, 4, 0]]), torch.tensor([7, 100]), POOL.mean)
    _, (one,) = texts.score(truth(0), torch.tensor([[2, 3, 3, 4]]), None, pool)
    assert one.identified == 1


def test_each_reconstruction_serves_one_text():
    tokens, labels = torch.tensor([[5, 6, 9, 0], [3, 3, 2, 9]]), torch.tensor([8, 9])
    victim, (first, second) = texts.score(truth(0, 1), tokens, labels, POOL)
    assert (first.token_recall, second.token_recall) == (3 / 4, 2 / 3)
    assert (first.label_found, second.label_found) == (9, 8)
    assert victim.label_found == "9 8"
    assert texts.in_order(truth(0, 1).x, tokens).tolist() == [[3, 3, 2, 9], [5, 6, 9, 0]]


def test_a_text_without_a_reconstruction_has_lost_no_word():
    victim, (first, second) = texts.score(truth(0, 1), torch.tensor([[5, 6]]), None, POOL)
    assert (first.matched, first.token_recall, first.identified, first.found) == (False, 0, 0, 0)
    assert second.matched
    assert victim.identified == 0.5
    assert texts.in_order(truth(0, 1).x, torch.tensor([[5, 6]])).tolist() == [[0, 0], [5, 6]]


def test_without_any_reconstruction_nothing_is_measured():
    victim, (one,) = texts.score(truth(0), None, torch.tensor([0]), POOL)
    assert (one.token_recall, one.set_exact, one.identified, victim.identified) == (None, None, None, None)
    assert one.recall_blind == 0.5
    assert victim.label_correct == 1
    assert texts.score(truth(0), None, None, POOL)[0].label_correct is None


def test_a_pool_without_the_victim_is_damage():
    foreign = Truth(POOL.images[:1], torch.tensor([0]), torch.tensor([5]), {}, None)
    with pytest.raises(RunError, match="the pool lacks the victim's text 5"):
        texts.score(foreign, None, None, POOL)


def test_images_in_the_vault_of_a_run_on_texts_are_damage():
    image = Truth(torch.rand(1, 1, 2, 2), torch.tensor([0]), torch.tensor([100]), {}, None)
    with pytest.raises(RunError, match="it holds images, but the run trained on texts"):
        texts.score(image, None, None, POOL)


def test_labels_must_be_as_many_as_texts():
    with pytest.raises(ValueError, match="1 texts and 2 labels"):
        texts.score(truth(0), torch.tensor([[2]]), torch.tensor([1, 2]), POOL)


def test_tokens_come_back_from_the_vault_and_damage_is_named(tmp_path):
    writer, t = VaultWriter(tmp_path), truth(0, 1)
    writer.victim("r0-c0-v0", t.x, t.y, t.dataset_index, {}, {})
    writer.pool(POOL.images, POOL.dataset_index, POOL.mean)
    vault = Vault(tmp_path)
    assert torch.equal(vault.truth("r0-c0-v0").x, t.x)
    assert torch.equal(vault.pool().mean, POOL.mean)
    for bad in (-t.x, t.x[0], t.x[:0]):
        change(vault, "r0-c0-v0.safetensors", x=bad)
        with pytest.raises(RunError, match=r"'x' is .*; it must be token numbers"):
            vault.truth("r0-c0-v0")
    change(vault, "pool.safetensors", mean=torch.rand(1, 2, 2))
    with pytest.raises(RunError, match=r"'mean' is .*; it must be token numbers"):
        vault.pool()
