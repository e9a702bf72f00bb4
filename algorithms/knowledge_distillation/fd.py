"""FD: clients keep their whole models and exchange their mean predictions for each class; others' are the teacher.

Source   Jeong et al., NeurIPS 2018 workshop MLPCD, arXiv 1811.11479: federated distillation, without its augmentation.
Solves   locally  min over theta of  mean_b H(y_b, p_b) + gamma [y_b taught] H(T_{y_b}, p_b),  H(q, p) = -sum q log p,
         p = softmax(f(x)); T_l: mean over the other clients of their mean p on class l
Wire     down teacher, known | up output, held     Private   body.*, head.*
Cost     1 FedAvg pass (the predictions of its steps are used; one forward pass more with collect = eval); at most C^2
         numbers each way; N C^2 on the server.
Leaks    The exact set of a client's labels; mean predictions of a model that the server does not have, but in the first
         exchange with private_start = shared. Of two holders of a class each is sent the other's row as it is.
Limits   gamma = 0: isolated training that still sends predictions.
Differs  teacher: PFLlib includes a client's own row.  space: PFLlib takes logits for a cross entropy's target, which then
         has no minimum; here logits are compared by their squared distance, a mean over classes.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart
from pflsec.core.config import at_least, option
from pflsec.core.items import Items
from pflsec.core.local import Local
from pflsec.core.network import Net
from pflsec.core.prototypes import as_table
from pflsec.training.local import cross_entropy


class FDConfig(PrivateStart):
    gamma: float = at_least(0, default=1.0, about="weight of the distance to the teacher", pfllib=1.0)
    space: Literal["probabilities", "logits"] = option(
        default="probabilities",
        about="what is averaged and compared: by cross entropy, or by mean squared distance",
        paper="probabilities",
        pfllib="logits",
    )
    collect: Literal["train", "eval"] = option(
        default="train",
        about="predictions that are averaged: those of all local steps, or of the trained model",
        paper="train",
        pfllib="train",
    )
    include_self: bool = option(
        default=False, about="a client's own row takes part in its teacher", paper=False, pfllib=True
    )
    keep: bool = option(
        default=True,
        about="the last row of a client that is away stays in the means",
        paper="all take part",
        pfllib=False,
    )


class FD(Algorithm[FDConfig]):
    key, shared, private = "fd", (), ("body", "head")
    Config = FDConfig
    down: ClassVar = {"teacher": "logits [known, C]", "known": "label set [C]"}
    up: ClassVar = {"output": "logits [held, C]", "held": "label set [C]"}
    dp_support = "partial: output and held are computed from raw data"
    presets: ClassVar = {
        "pfllib": {"space": "logits", "include_self": True, "keep": False, "private_start": "shared", "lr": 0.005,
                   "batch_size": 10, "local_epochs": 1},
    }  # fmt: skip

    def __init__(self, cfg: FDConfig, net: Net, clients: int):
        super().__init__(cfg, net, clients)
        if cfg.collect == "train":
            self.dp_support = (
                "none: with collect = train the raw outputs of every step are sent; collect = eval sums them once"
            )

    def init_server(self, fresh: Items) -> Items:
        """Return the last rows of every client, [N, C, C], and which there are, [N, C]; a row that is not is zero."""
        classes = self.net.classes
        held = torch.zeros(self.clients, classes, dtype=torch.bool)
        return {"output": torch.zeros(self.clients, classes, classes), "held": held}

    def downlink(self, server: Items, client: int) -> Items:
        counted = server["held"]
        if not self.cfg.include_self:
            counted = counted & (torch.arange(self.clients) != client)[:, None]
        number = counted.sum(0)
        known = number > 0
        total = (counted[:, :, None] * server["output"]).sum(0)
        return {"teacher": total[known] / number[known, None], "known": known}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        cfg, classes = self.cfg, self.net.classes
        table = as_table(down["teacher"], down["known"])
        if cfg.space == "probabilities":  # noise can make them negative, of which there is no entropy
            table = table.clamp(min=0)
        taught, entropy = down["known"].to(table), -torch.xlogy(table, table).sum(1)
        sums = [table.new_zeros(classes, classes + 1)]

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z, target = self.net.logits(model, x), ctx.one_hot(y)
            if cfg.collect == "train":
                sums.append(class_sums(target, ctx.constant(self.output(z))))
            goal = target @ table  # zero without a teacher, and so is its cross entropy
            if cfg.space == "probabilities":  # less what no training can change, so that agreement costs nothing
                off = cross_entropy(z, goal) - target @ entropy
            else:
                off = (target @ taught) * (z - goal).square().mean(1)
            return cross_entropy(z, y) + cfg.gamma * off

        model = ctx.fit(state, on=loss)
        if cfg.collect == "eval":
            total, counts = ctx.class_sums(lambda x: self.output(self.net.logits(model, x)))
            sums = [torch.cat([total, counts[:, None]], 1)]
        total = torch.stack(sums).sum(0)
        held = total[:, -1] > 0
        return Done(state=model, up={"output": total[held, :-1] / total[held, -1:], "held": held})

    def output(self, z: Tensor) -> Tensor:
        """Return what is averaged and sent, from logits [B, C]."""
        return z.softmax(1) if self.cfg.space == "probabilities" else z

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        output, held = (v.clone() if self.cfg.keep else torch.zeros_like(v) for v in (server["output"], server["held"]))
        for client, up in ups.items():
            held[client] = up["held"]
            output[client] = torch.zeros_like(output[client])
            output[client, up["held"]] = up["output"]
        return {"output": output, "held": held}


def class_sums(target: Tensor, output: Tensor) -> Tensor:
    """Return sums over each class of the outputs [B, C] and, in the last column, of the labels: [C, C + 1]."""
    return target.T @ torch.cat([output, torch.ones_like(output[:, :1])], 1)
