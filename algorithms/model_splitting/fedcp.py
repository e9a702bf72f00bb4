"""FedCP: a policy splits each sample's features between a personal head and the global one.

Source   Zhang et al., KDD 2023, arXiv 2307.01217; authors' code where the paper leaves things open.
Solves   min over body b, policy q and heads h_i of  sum_i mean CE(h_i(s b(x)) + g(r b(x)), y) + lam MMD^2(b(x), b_t(x)),
         (s, r) = softmax(q(v_i b(x))), s + r = 1 per feature; g, b_t as received; v_i the column sums of h_i, length 1
Wire     down body.*, head.*, policy.weight, policy.bias, policy.scale, policy.shift
         | up body.*, head.* (mix of h_i and 1 - mix of g), policy.weight, policy.bias, policy.scale, policy.shift,
         num_samples
Private  head.* (h_i; all other is sent as it is)
Cost     FedAvg and one more forward of the body; the policy adds 2 d^2 + 6 d numbers each way.
Leaks    h_i itself: the server knows g and mix. With it the gradients of body, policy and, from a client's second upload
         on, head; in one step the MMD term is nothing (b = b_t). With gumbel, replays use the client's own draws: more
         than an attacker has.
Limits   lam = 0: cross entropy alone.   mix = 1: h_i is sent as it is.
Differs  policy: PFLlib gumbel, in tests too; here noise in training alone.   Body, g and q come together each round; in
         PFLlib g and q go to the last cohort alone.   v_i: every round from h_i; PFLlib's first is random.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import above, at_least, between, option
from pflsec.core.errors import UnfitError
from pflsec.core.items import Items, combine, prefixed, select, subtract, without_prefix
from pflsec.core.local import Local
from pflsec.core.network import Net
from pflsec.core.streams import seed_from, stream
from pflsec.training.local import cross_entropy

BANDWIDTHS = (10.0, 15.0, 20.0, 50.0)


class FedCPConfig(PrivateStart):
    lam: float = at_least(0, default=5.0, about="weight of the distance to the received body", paper=5.0, pfllib=1.0)
    temperature: float = above(0, default=1.0, about="temperature of the policy's softmax", paper=1.0, pfllib=1.0)
    policy: Literal["softmax", "gumbel"] = option(
        default="softmax", about="gumbel adds noise to the policy in training", paper="softmax", pfllib="gumbel"
    )
    mix: float = between(
        0.01, 1, default=0.5, about="share of the personal head in the head that is sent", paper=0.5, pfllib=0.5
    )


class FedCP(Algorithm[FedCPConfig]):
    key, shared, private = "fedcp", ("body", "head"), ("head",)
    Config = FedCPConfig
    down: ClassVar = {
        "body.*": "weights", "head.*": "weights",
        "policy.weight": "weights [m, d]", "policy.bias": "weights [m]",
        "policy.scale": "weights [m]", "policy.shift": "weights [m]",
    }  # fmt: skip
    up: ClassVar = {
        "body.*": "weights", "head.*": "weights",
        "policy.weight": "weights [m, d]", "policy.bias": "weights [m]",
        "policy.scale": "weights [m]", "policy.shift": "weights [m]", "num_samples": "counts",
    }  # fmt: skip
    dp_support = "none: the distance between features couples the rows of a batch"
    presets: ClassVar = {
        "paper": {"lam": 5.0, "lr": 0.005, "batch_size": 10, "local_epochs": 1},
        "pfllib": {"lam": 1.0, "policy": "gumbel", "private_start": "shared", "lr": 0.005, "batch_size": 10,
                   "local_epochs": 1},
    }  # fmt: skip

    def __init__(self, cfg: FedCPConfig, net: Net, clients: int):
        super().__init__(cfg, net, clients)
        sizes = [net.shapes[name] for name in self.layers()]
        if not sizes or [s[1] for s in sizes] != [net.feature_dim, *(s[0] for s in sizes[:-1])]:
            raise UnfitError("fedcp: the head must be linear layers, one after the other. Choose a later --split.")

    def layers(self) -> list[str]:
        """Return the names of the head's weight matrices, in the order of the forward pass."""
        return [name for name, shape in self.net.shapes.items() if name.startswith("head.") and len(shape) > 1]

    def init_server(self, fresh: Items) -> Items:
        d, example = self.net.feature_dim, next(iter(fresh.values()))
        rng = stream(self.key, seed_from(fresh), "start")
        sizes = {"weight": (2 * d, d), "bias": (2 * d,)}
        drawn = {k: d**-0.5 * (2 * torch.rand(*s, generator=rng, dtype=example.dtype) - 1) for k, s in sizes.items()}
        norm = {"scale": example.new_ones(2 * d), "shift": example.new_zeros(2 * d)}
        return fresh | prefixed("policy", drawn | norm)

    def init_client(self, fresh: Items, server: Items) -> Items:
        return select(fresh, "head") | {"trained": torch.tensor(False)}

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        received, common, v = select(down, "body"), select(down, "head"), self.context(state)
        noise = ctx.rng("policy") if self.cfg.policy == "gumbel" else None

        def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
            z = self.net.features(model, x)
            ce = cross_entropy(self.joined(model, common, v, z, noise), y)
            return ce + self.cfg.lam * mmd_rows(z, self.net.features(received, x)) if self.cfg.lam else ce

        model = ctx.fit(select(down, "body", "policy") | select(state, "head"), on=loss)
        head = select(model, "head")
        mixed = combine(lambda g, h: torch.lerp(g, h, self.cfg.mix), common, head)
        sent = select(model, "body", "policy") | mixed | sample_count(ctx)
        return Done(state=head | {"trained": torch.tensor(True)}, up=sent)

    def context(self, head: Items) -> Tensor:
        """Return v [d]: the sum over the classes of the head's rows, with length 1 (0 where that sum is 0)."""
        *lower, last = (head[name] for name in self.layers())
        v = last.sum(0)
        for weight in reversed(lower):
            v = v @ weight
        return F.normalize(v, dim=0)

    def joined(self, model: Items, common: Items, v: Tensor, z: Tensor, noise: torch.Generator | None) -> Tensor:
        """Return the logits of features z [B, d]: the personal head's of one part and the global head's of the rest."""
        s, r = self.split(model, v * z, noise)
        return self.net.head(model, s * z) + self.net.head(common, r * z)

    def split(self, model: Items, conditioned: Tensor, noise: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Return the shares (s, r) of the personal and the global head in each feature, [B, d] each; s + r = 1."""
        a = F.linear(conditioned, model["policy.weight"], model["policy.bias"])
        a = F.layer_norm(a, a.shape[1:], model["policy.scale"], model["policy.shift"]).relu().unflatten(1, (2, -1))
        if noise is not None:  # in float64 whatever the model is, so that a replay in another dtype draws the same
            uniform = torch.rand(a.shape, generator=noise, dtype=torch.float64).clamp(min=1e-300)
            a = a - (-uniform.log()).log().to(a)
        s, r = (a / self.cfg.temperature).softmax(1).unbind(1)
        return s, r

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        return mean_of_uploads(ups, "body", "head", "policy", weighting="samples")

    def deploy(self, state: Items, down: Items) -> Items:
        return select(down, "body", "policy") | select(state, "head") | prefixed("common", select(down, "head"))

    def deploy_trained(self, state: Items, down: Items, up: Items) -> Items:
        """The global head stood still in training: it is the one received, not the mixture that is sent."""
        return self.deploy(state, down | select(up, "body", "policy"))

    def scores(self, items: Items, x: Tensor) -> Tensor:
        z = self.net.features(items, x)
        return self.joined(items, without_prefix("common", items), self.context(items), z, None)

    def unmixed(self, down: Items, up: Items) -> Items:
        """Return the personal head that an upload was mixed from."""
        mix = self.cfg.mix
        return combine(lambda g, sent: (sent - (1 - mix) * g) / mix, select(down, "head"), select(up, "head"))

    def observe(self, memory: Items, down: Items, up: Items) -> Items:
        return self.unmixed(down, up) | {"trained": torch.tensor(True)}

    def reconstruct_state(self, memory: Items) -> Items:
        """Before the first upload a head that was drawn apart is nobody else's."""
        public = self.cfg.private_start == "shared"
        return memory if public or memory["trained"] else select(memory, "trained")

    def change(self, state: Items, down: Items, up: Items, lr: float, steps: int) -> Items:
        """Where the head's start is unknown, the trained head stands for its gradient, under another name."""
        seen, head = super().change(state, down, up, lr, steps), self.unmixed(down, up)
        if not state["trained"] and self.cfg.private_start == "apart":
            return {k: v for k, v in seen.items() if k not in head} | prefixed("trained", head)
        return seen | combine(lambda move: move / (lr * steps), subtract(select(state, "head"), head))


def mmd_rows(a: Tensor, b: Tensor) -> Tensor:
    """Return [B] values whose mean is the squared, biased MMD of the rows of a and b [B, d], under a sum of Gaussians."""

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        apart = (a[:, None] - b).square().sum(2)
        return torch.stack([torch.exp(apart / (-2 * width)) for width in BANDWIDTHS]).sum(0)

    return (kernel(a, a) + kernel(b, b) - 2 * kernel(a, b)).mean(1)
