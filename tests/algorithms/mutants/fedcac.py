"""Planted bugs of FedCAC."""

from collections.abc import Mapping

import torch
from torch import Tensor

from pflsec.algorithms.model_splitting.fedcac import FedCAC, overlaps
from pflsec.core.items import Items, combine, select, without_prefix
from tests.algorithms import test_fedcac as fedcac
from tests.algorithms.mutants.planted import Mutant


class InitialWeightsComeBack(FedCAC):
    """No customised model after the first aggregation, though there are masks."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        old = select(server, "custom") if not server["turn"] else {}
        return super().aggregate(server, ups) | old


class RoundsFromZero(FedCAC):
    def partners(self, masks: list[Items], turn: int) -> Tensor:
        return super().partners(masks, turn - 1)


class NoTolerance(FedCAC):
    def partners(self, masks: list[Items], turn: int) -> Tensor:
        overlap, self_ = overlaps(masks), torch.eye(len(masks), dtype=torch.bool)
        pairs = overlap[~self_]
        return self_ | (overlap >= pairs.mean() + turn / self.cfg.beta * (pairs.max() - pairs.mean()))


class OverlapWithItselfCounts(FedCAC):
    def partners(self, masks: list[Items], turn: int) -> Tensor:
        overlap = overlaps(masks)
        least = overlap.mean() + turn / self.cfg.beta * (overlap.max() - overlap.mean())
        return torch.eye(len(masks), dtype=torch.bool) | (overlap >= least - 1e-12)


class TheWrongHalf(FedCAC):
    def start(self, state: Items, down: Items) -> Items:
        model, custom = select(down, *self.shared), without_prefix("custom", down)
        return combine(torch.where, without_prefix("mask", state), model, custom) if custom else model


class ByChangeAlone(FedCAC):
    def critical(self, was: Tensor, now: Tensor) -> Tensor:
        return super().critical(was / now, torch.ones_like(now))


class FixedCount(FedCAC):
    def critical(self, was: Tensor, now: Tensor) -> Tensor:
        size = ((now - was).abs() * now.abs()).flatten()
        first = size.topk(int(self.cfg.tau * size.numel())).indices
        return torch.zeros_like(size, dtype=torch.bool).index_fill(0, first, True).view_as(now)


class EverybodyIsSentTo(FedCAC):
    """The absent get this round's mean as their customised model."""

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        new = super().aggregate(server, ups)
        absent = torch.tensor([c not in ups for c in range(self.clients)])
        for k in self.net.shapes:
            bank = new[f"custom.{k}"].clone()
            bank[absent] = new[k]
            new[f"custom.{k}"] = bank
        return new


class TestsTheGlobalModel(FedCAC):
    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, *self.shared)


MUTANTS = [
    Mutant(
        "initial weights come back",
        FedCAC,
        fedcac.check_4_a_customised_model_is_the_mean_over_partners,
        InitialWeightsComeBack,
    ),
    Mutant("rounds from 0", FedCAC, fedcac.check_5_at_beta_a_pair_is_left, RoundsFromZero),
    Mutant(
        "a client overlaps with itself",
        FedCAC,
        fedcac.check_4_a_customised_model_is_the_mean_over_partners,
        OverlapWithItselfCounts,
    ),
    Mutant("no tolerance", FedCAC, fedcac.check_equal_overlaps_are_never_parted_by_rounding, NoTolerance),
    Mutant("the wrong half", FedCAC, fedcac.check_2_training_starts_at_the_mixture, TheWrongHalf),
    Mutant("global model is tested", FedCAC, fedcac.check_a_client_is_tested_with_its_next_start, TestsTheGlobalModel),
    Mutant("by change alone", FedCAC, fedcac.check_3_the_mask_is_of_the_largest_changes_times_values, ByChangeAlone),
    Mutant("zeros are critical", FedCAC, fedcac.check_an_entry_that_did_not_move_is_not_critical, FixedCount),
    Mutant(
        "the absent are overwritten",
        FedCAC,
        fedcac.check_the_absent_find_their_customised_model_as_it_was,
        EverybodyIsSentTo,
    ),
]
