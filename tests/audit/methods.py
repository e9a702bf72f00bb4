"""Methods as a user writes them into a file: FedAvg as it is registered, and with one fault each."""

from pathlib import Path

import pflsec

FEDAVG = (Path(pflsec.__file__).parent / "algorithms" / "traditional" / "fedavg.py").read_text(encoding="utf8")
FIT = "        model = ctx.fit(down, on=ctx.ce)\n"
SMALL = {
    "model": "mlp",
    "partition": "iid",
    "clients": 4,
    "rounds": 2,
    "capture_rounds": "last",
    "capture_clients": "0,1",
    "victims": 3,
}
"""Options of a training that takes a second."""
FAST = {"iterations": 3, "restarts": 1}


def write(path: Path, body: str = FIT, text: str = FEDAVG) -> str:
    """Write a copy of FedAvg whose local work begins with `body`; return its name as the registry takes it."""
    assert FIT in text
    path.write_text(text.replace(FIT, body), encoding="utf8")
    return f"{path}:FedAvg"


UNDECLARED = FIT + '        model = model | {"secret": ctx.targets()}\n'
COUPLED = """\
        def on(params, x, y):
            losses = ctx.ce(params, x, y)
            return losses - losses.mean() / 2

        model = ctx.fit(down, on=on)
"""
RAW = """\
        import torch

        leaves = {k: v.detach().clone().requires_grad_() for k, v in down.items()}
        loss = ctx.ce(leaves, ctx.x, ctx.y).mean()
        found = torch.autograd.grad(loss, list(leaves.values()))
        model = {k: v.detach() - ctx.lr * g for (k, v), g in zip(leaves.items(), found, strict=True)}
"""
LATE = '        if ctx.round == 1:\n            raise ValueError("no more")\n' + FIT
