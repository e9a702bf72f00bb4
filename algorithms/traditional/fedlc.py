"""FedLC: logits are calibrated by the client's own class counts, so that rare classes must win by a larger margin.

Source   Zhang et al., ICML 2022, arXiv 2209.00189, section 4.
Solves   locally  min over theta of  mean CE(f(x; theta) - m_k, y),  m_kc = tau n_kc^(-1/4), n_kc the client's rows of class c;
         a class that it has not is left out of the softmax (missing = mask). The model is used without m_k
Wire     down body.*, head.* (label_counts with counts = global)
         | up body.*, head.*, num_samples (not with weighting = uniform; label_counts with counts = global)
Private  the class counts
Cost     FedAvg and one subtraction of C numbers a batch; FedAvg's bytes.
Leaks    As FedAvg, through C unknown numbers. The head's rows of classes that the client has not at all stand still to the
         last bit: one upload, of any length, gives the exact set of its classes.
Limits   tau = 0, or equal counts: FedAvg. One class: nothing moves; a probe of one image in round 0 is such a client.
Differs  denominator: the paper's formula sums over the other classes alone, which has no lower bound and diverges; its text
         and public code take all.  tau: no value in the paper, PFLlib 1.  counts: PFLlib sums everybody's.
"""

import warnings
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, mean_of_uploads, sample_count
from pflsec.core.config import Config, at_least, option
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, select, with_rows
from pflsec.core.local import Local

EXPONENT = -1 / 4


class FedLCConfig(Config):
    tau: float = at_least(0, default=0.5, about="size of the margins", pfllib=1.0)
    denominator: Literal["all", "others"] = option(
        default="all", about="classes in the softmax: all, or all but the row's own", paper="others", pfllib="all"
    )
    missing: Literal["mask", "floor"] = option(
        default="mask", about="a class without rows leaves the softmax, or counts as one of a single row"
    )
    counts: Literal["local", "global"] = option(
        default="local",
        about="whose rows are counted; global: clients send their counts, and the sums come back a round later",
        paper="local",
        pfllib="global",
    )
    weighting: Literal["samples", "uniform"] = option(
        default="samples", about="weights of the mean over uploads", paper="samples", pfllib="samples"
    )


class FedLC(Algorithm[FedLCConfig]):
    key, shared, private = "fedlc", ("body", "head"), ()
    Config = FedLCConfig
    down: ClassVar = {"body.*": "weights", "head.*": "weights", "label_counts?": "counts [C]"}
    up: ClassVar = {
        "body.*": "weights",
        "head.*": "weights",
        "num_samples?": "counts",
        "label_counts?": "counts [C]",
    }
    dp_support = "partial: the label counts that the margins are made of are computed from raw data"
    batchnorm = "yes"
    presets: ClassVar = {
        "pfllib": {"tau": 1.0, "counts": "global", "lr": 0.005, "batch_size": 10, "local_epochs": 1},
    }

    def init_server(self, fresh: Items) -> Items:
        table = {"label_counts": torch.zeros(self.clients, self.net.classes)} if self.cfg.counts == "global" else {}
        return fresh | table

    def init_client(self, fresh: Items, server: Items) -> Items:
        """Return equal counts, which change nothing, and whether they have been taken."""
        return {"counts": torch.ones(self.net.classes), "counted": torch.tensor(False)}

    def downlink(self, server: Items, client: int) -> Items:
        sums = {"label_counts": server["label_counts"].sum(0)} if self.cfg.counts == "global" else {}
        return select(server, *self.shared) | sums

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        own = state["counts"] if state["counted"] else ctx.class_counts()
        counts = down["label_counts"] if self.cfg.counts == "global" else own

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            return self.calibrated(self.net.logits(model, x), ctx.one_hot(y), counts)

        known = self.cfg.tau > 0 and bool(counts.any())
        if known and self.cfg.missing == "mask" and (counts > 0).sum() == 1:
            warnings.warn(
                "fedlc: a client, or a probe of round 0, has rows of one class alone, so that nothing of its model moves. "
                "missing = floor keeps the other classes in.",
                PflsecWarning,
                stacklevel=2,
            )
        model = ctx.fit(select(down, *self.shared), on=loss if known else ctx.ce)
        sent = sample_count(ctx) if self.cfg.weighting == "samples" else {}
        sent |= {"label_counts": own} if self.cfg.counts == "global" else {}
        return Done({"counts": own, "counted": torch.tensor(True)}, up=model | sent)

    def calibrated(self, logits: Tensor, target: Tensor, counts: Tensor) -> Tensor:
        """Return the loss [B] of logits [B, C] under targets [B, C], one-hot or probabilities, by class counts [C]."""
        counts = counts.clamp(min=0 if self.cfg.missing == "mask" else 1)
        held = counts > 0
        seen, target = logits[:, held] - self.cfg.tau * counts[held] ** EXPONENT, target[:, held]
        if self.cfg.denominator == "all":
            return -(target * seen.log_softmax(1)).sum(1)
        if seen.shape[1] < 2:  # nothing to be told apart from
            return 0 * seen.sum(1)
        itself = torch.eye(seen.shape[1], dtype=torch.bool)
        others = seen[:, None].expand(-1, seen.shape[1], -1).masked_fill(itself, -torch.inf).logsumexp(2)
        return (target * (others - seen)).sum(1)

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        mean = mean_of_uploads(ups, *self.shared, weighting=self.cfg.weighting)
        if self.cfg.counts == "local":
            return mean
        return mean | with_rows(
            select(server, "label_counts"), {c: select(up, "label_counts") for c, up in ups.items()}
        )

    def global_model(self, server: Items) -> Items:
        return select(server, *self.shared)

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        counts = up["label_counts"] if self.cfg.counts == "global" else memory["counts"]
        return {"counts": counts, "counted": torch.tensor(True)}

    def reconstruct_state(self, memory: Items) -> Items:
        return memory if self.cfg.counts == "global" else select(memory, "counted")

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """The label counts are left out: they are read, not matched."""
        return super().change(state, down, select(up, *self.shared), lr, steps)
