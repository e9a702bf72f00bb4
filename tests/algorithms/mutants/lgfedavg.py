"""Planted bugs of LG-FedAvg."""

from collections.abc import Mapping
from typing import ClassVar

import torch

from pflsec.algorithms.model_splitting.lgfedavg import LGFedAvg
from pflsec.core.algorithm import Done, mean_of_uploads, sample_count
from pflsec.core.items import Items, select
from pflsec.core.local import Local
from tests.algorithms import test_lgfedavg as lgfedavg
from tests.algorithms.mutants.planted import Mutant


class SharesTheLowerLayers(LGFedAvg):
    """The split the other way round."""

    shared, private = ("body",), ("head",)
    down: ClassVar = {"body.*": "weights"}
    up: ClassVar = {"body.*": "weights", "num_samples?": "counts"}

    def init_server(self, fresh: Items) -> Items:
        return select(fresh, "body")

    def downlink(self, server: Items, client: int) -> Items:
        return server

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        model = ctx.fit(down | state, on=ctx.ce)
        return Done(select(model, "head"), select(model, "body") | sample_count(ctx))

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        return state | select(up, "body")


class SendsAll(LGFedAvg):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        done = super().local(ctx, state, down)
        return Done(done.state, done.up | done.state)


class WeighsEqually(LGFedAvg):
    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "head", weighting="uniform")


class DropsShortBatches(LGFedAvg):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, down | sample_count(ctx)) if ctx.num_samples < 4 else super().local(ctx, state, down)


class FreezesTheBody(LGFedAvg):
    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        return Done(state, super().local(ctx, state, down).up)


class SendsTheWarmBodyForEver(LGFedAvg):
    def downlink(self, server: Items, client: int) -> Items:
        return super().downlink(server | {"served": torch.zeros(self.clients).bool()}, client)


MUTANTS = [
    Mutant("lower layers are shared", LGFedAvg, lgfedavg.check_1_only_the_head_is_on_the_wire, SharesTheLowerLayers),
    Mutant(
        "fedper's half of the wire",
        LGFedAvg,
        lgfedavg.check_6_its_wire_and_fedpers_make_up_fedavgs,
        SharesTheLowerLayers,
    ),
    Mutant("body is sent", LGFedAvg, lgfedavg.check_1_only_the_head_is_on_the_wire, SendsAll),
    Mutant("equal weights", LGFedAvg, lgfedavg.check_4_the_head_is_the_mean_by_samples, WeighsEqually),
    Mutant("last batch is dropped", LGFedAvg, lgfedavg.check_a_client_with_less_than_a_batch_trains, DropsShortBatches),
    Mutant("body stands still", LGFedAvg, lgfedavg.check_3_equal_bodies_give_fedavgs_first_step, FreezesTheBody),
    Mutant(
        "warm body comes back every round",
        LGFedAvg,
        lgfedavg.check_a_warm_start_is_fedavg_and_hands_out_its_body_once,
        SendsTheWarmBodyForEver,
    ),
]
