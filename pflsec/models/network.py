"""The functional view: any nn.Module, cut into body and head at a named layer, as a pure function of its items."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pflsec.core.errors import ModelError
from pflsec.core.inputs import example
from pflsec.core.items import Items
from pflsec.core.network import Reads, Statistics
from pflsec.core.streams import seed_of
from pflsec.models import batchnorm
from pflsec.models.batchnorm import BatchNorm

SAMPLE_NORMS = (nn.GroupNorm, nn.LayerNorm)
REFUSED = {
    nn.modules.instancenorm._InstanceNorm: "it may keep running statistics of private data",
    nn.modules.dropout._DropoutNd: "its random masks cannot be replayed by an attack yet",
}


class Network:
    """A module as a pure function of named items `body.*` and `head.*` (see pflsec.core.network.Net).

    factory  builds the module, drawing its parameters from torch's global generator
    shape    of one input, (C, H, W) or (T,)
    split    name of the layer with which the head begins; None: the last layer that has parameters
    frozen   the running statistics of BatchNorm layers are constants, (0, 1), and no items; training uses them as testing
    vocabulary  inputs are texts of shape (T,) of so many words; None: images (see pflsec.core.inputs.InputSpec)

    torch's BatchNorm layers are replaced by ours, with the same values. Raises ModelError when the module has layers that
    cannot be replayed, or when it cannot be cut there.
    """

    inserted: nn.Module | None = None

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        shape: tuple[int, ...],
        classes: int,
        split: str | None = None,
        *,
        frozen: bool = False,
        vocabulary: int | None = None,
    ):
        self._factory, self.frozen = factory, frozen
        with torch.random.fork_rng(devices=[]):
            module = self._made()
        _refuse_layers(module)
        self.shape, self.classes, self.vocabulary = tuple(shape), classes, vocabulary
        self.split = split or _last_layer(module)
        self._body, self._head = _cut(module, self.split)
        self._cut_within = "" if _in_a_row(module, self.split) else f"{self.split}."
        self._layers = [m for m in module.modules() if isinstance(m, BatchNorm)]
        self.batchnorms = tuple(name for name, m in module.named_modules() if isinstance(m, BatchNorm))
        """Names of the BatchNorm layers in the module."""
        held = list(self._held(self._body, self._head))
        self._slots = {name: (slots, key) for name, _, slots, key in held}
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(slots[key].shape) for name, _, slots, key in held}
        self.norms = frozenset(name for name, owner, _, _ in held if isinstance(owner, BatchNorm))
        self.sample_norms = frozenset(name for name, owner, _, _ in held if isinstance(owner, SAMPLE_NORMS))
        self.buffers = frozenset(name for name, owner, slots, _ in held if slots is owner._buffers)
        items = {id(slots[key]): name for name, _, slots, key in held}
        self.names: Mapping[str, str] = {path: items[id(v)] for path, v in _values_in(module) if id(v) in items}
        """Item of every parameter and buffer by the module's own name for it, as in its state_dict."""
        self.embeddings = frozenset(name for name, owner, _, _ in held if isinstance(owner, nn.Embedding))
        self._check(module)

    def lengthened(self, name: str, make: Callable[[tuple[int, ...]], nn.Module]) -> "Network":
        """Return the network with one layer more, the last of its body. Fresh draws of all other parameters stay the same.

        name  of the layer in the body, and of what it holds: `body.<name>.*`
        make  makes the layer from the shape of one input's features, which it keeps; it draws its parameters from torch's
              global generator
        Raises ModelError where the network cannot take it.
        """
        within = self._cut_within

        def factory() -> nn.Module:
            module = self._factory()
            _insert(module, self.split, within, name, make(self._cut_shape))
            return module

        split = within + self.split.rpartition(".")[2]
        longer = Network(factory, self.shape, self.classes, split, frozen=self.frozen, vocabulary=self.vocabulary)
        longer.inserted = longer._body.get_submodule(within + name)
        return longer

    def features(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the body's output, flattened to [B, feature_dim]."""
        self._write(items, "body.")
        return self._body(x).flatten(1)

    def head(self, items: Mapping[str, Tensor], z: Tensor) -> Tensor:
        """Return the logits [B, classes] of features z [B, feature_dim]."""
        self._write(items, "head.")
        return self._head(z.unflatten(1, self._cut_shape))

    def logits(self, items: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Return the logits [B, classes] of inputs x [B, C, H, W], or tokens [B, T]."""
        self._write(items, "body.")
        self._write(items, "head.")
        return self._head(self._body(x))

    def linear_inputs(self, items: Mapping[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        """Return what each linear layer reads for inputs x [B, C, H, W], [B, n], by the prefix of the layer's parameters, in
        the order of the forward pass. Layers that read more than one vector an input are left out."""
        read: dict[str, list[Tensor]] = {}

        def look(name: str, layer: nn.Module) -> RemovableHandle:
            return layer.register_forward_pre_hook(lambda _, given: read.setdefault(name, []).append(given[0]))

        hooks = [
            look(f"{part}.{path}".removesuffix("."), layer)
            for part, half in (("body", self._body), ("head", self._head))
            for path, layer in half.named_modules()
            if type(layer) is nn.Linear
        ]
        try:
            self.logits(items, x)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: many[0] for name, many in read.items() if len(many) == 1 and many[0].dim() == 2}

    @contextmanager
    def reading(self, layer: str) -> Iterator[Reads]:
        """Yield what this linear layer reads in the forward passes of the context (see pflsec.core.network.Net)."""
        part, _, path = layer.partition(".")
        module = (self._body if part == "body" else self._head).get_submodule(path)
        read: Reads = {}

        def look(module: nn.Module, given: tuple[Tensor, ...]) -> None:
            weight = module._parameters["weight"]
            assert weight is not None  # a linear layer has one
            read.setdefault(id(weight), (weight, []))[1].append(given[0])

        hook = module.register_forward_pre_hook(look)
        try:
            yield read
        finally:
            hook.remove()

    def laid_out(self, x: Tensor) -> Tensor:
        """Return inputs [B, C, H, W] in the memory layout in which a forward pass is fastest: channels last, up to 3 times
        for convolutions on a CPU, unless the module cannot read it. Training is not faster by it."""
        return x.contiguous(memory_format=torch.channels_last) if self._reads_channels_last else x

    def fresh(self, *key: int | str) -> Items:
        """Return newly drawn parameters, and buffers as they begin, from the stream with this key; torch's global generator
        is left alone."""
        return self._values(*self._draw(*key))

    def training(self) -> AbstractContextManager[Statistics]:
        """Return the context in which BatchNorm layers train (see pflsec.core.network.Net); frozen ones never do."""
        return batchnorm.training([] if self.frozen else self._layers)

    @property
    def last_layer(self) -> str | None:
        """Prefix of the final linear layer's parameters ("head" or "head.fc"), or None if the network ends otherwise.

        Under cross entropy, the gradient of that layer's bias is softmax minus label.
        """
        name, layer = [(n, m) for n, m in self._head.named_modules() if not list(m.children())][-1]
        if not isinstance(layer, nn.Linear):
            return None
        return f"head.{name}" if name else "head"

    def size(self) -> int:
        """Return the number of parameters; buffers are none."""
        return sum(torch.Size(s).numel() for name, s in self.shapes.items() if name not in self.buffers)

    def _write(self, items: Mapping[str, Tensor], start: str) -> None:
        # Slots are resolved once and written only where the tensor changed: a new dict a step costs next to nothing.
        for name, (slots, key) in self._slots.items():
            if name.startswith(start) and slots[key] is not items[name]:
                slots[key] = items[name]

    def _made(self) -> nn.Module:
        return batchnorm.replaced(self._factory())

    def _draw(self, *key: int | str) -> tuple[nn.Module, nn.Module]:
        """Return body and head of a new module, drawn from the stream with this key."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed_of(*key))
            return _cut(self._made(), self.split)

    def _held(self, body: nn.Module, head: nn.Module) -> Iterator[tuple[str, nn.Module, dict, str]]:
        """Yield every item of two halves as (name, the layer that has it, where it is kept, under what key)."""
        for part, half in (("body", body), ("head", head)):
            met: set[int] = set()
            for path, owner in half.named_modules():
                for slots in (owner._parameters,) if self.frozen else (owner._parameters, owner._buffers):
                    for key, value in slots.items():
                        if value is not None and id(value) not in met:
                            met.add(id(value))
                            yield ".".join(filter(None, (part, path, key))), owner, slots, key

    def _values(self, body: nn.Module, head: nn.Module) -> Items:
        return {name: slots[key].detach().clone() for name, _, slots, key in self._held(body, head)}

    @torch.no_grad()
    def _check(self, module: nn.Module) -> None:
        """Run one input through the module and through the two halves: the cut must not change the function."""
        x = example(self.shape, self.vocabulary)
        try:
            whole = module(x)
        except Exception as error:
            raise ModelError(
                f"the model does not run on inputs of shape {list(self.shape)} ({error}). Choose a model for this size."
            ) from error
        if whole.shape != (1, self.classes):
            raise ModelError(
                f"the model returns {list(whole.shape[1:])}; it must return [{self.classes}] logits an input."
            )
        try:
            cut = self._body(x)
            halves = self._head(cut)
        except Exception:  # a half may fail in any way when it is none
            halves = cut = x[:, :0]
        if not torch.equal(halves, whole):
            raise ModelError(
                f"the model cannot be cut at '{self.split}': what follows it does not give the model's output. "
                f"Layers with parameters: {', '.join(_layers(module))}."
            )
        self._cut_shape = tuple(cut.shape[1:])
        self._reads_channels_last = len(self.shape) == 3 and self._runs_on(x.repeat(2, 1, 1, 1))
        self.feature_dim = cut[0].numel()
        self._check_parameters(module, x)

    def _runs_on(self, x: Tensor) -> bool:
        try:
            self._head(self._body(x.contiguous(memory_format=torch.channels_last)))
        except RuntimeError:  # such as `view` on a layout that it does not fit
            return False
        return True

    def _check_parameters(self, module: nn.Module, x: Tensor) -> None:
        """Each parameter must stand in one half, and other values for all of them must give another module's function."""
        covered = {v.data_ptr() for half in (self._body, self._head) for _, v in _values_in(half)}
        lost = [name for name, v in _values_in(module) if v.data_ptr() not in covered]
        if lost:
            raise ModelError(f"the cut at '{self.split}' leaves {', '.join(lost)} in neither body nor head.")
        if len(self.shapes) - len(self.buffers) > len(list(module.parameters())):
            raise ModelError(f"the cut at '{self.split}' goes through parameters that are shared by body and head.")
        body, head = self._draw("check")
        if not torch.equal(self.logits(self._values(body, head), x), head(body(x))):
            raise ModelError(
                "the model's parameters cannot be replaced from outside: some are shared by several layers, or are read "
                "from another place than their layer. Give each layer parameters of its own."
            )


def from_module(module: nn.Module, shape: tuple[int, ...], classes: int, split: str | None = None) -> Network:
    """Return the functional view of a module of the user's own.

    Fresh parameters are drawn by each layer's `reset_parameters`; ModelError names the layers that have none.
    """

    def factory() -> nn.Module:
        fresh = copy.deepcopy(module)
        for name, layer in fresh.named_modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
            elif next(layer.parameters(recurse=False), None) is not None:
                raise ModelError(
                    f"layer '{name}' has parameters but no reset_parameters(); add one that draws them anew."
                )
        return fresh

    return Network(factory, shape, classes, split)


def _layers(module: nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if name and next(m.parameters(recurse=False), None) is not None]


def _last_layer(module: nn.Module) -> str:
    names = _layers(module)
    if not names:
        raise ModelError("the model has no layer with parameters; it cannot be cut into body and head.")
    return names[-1]


def _refuse_layers(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        for kind, reason in REFUSED.items():
            if isinstance(layer, kind):
                raise ModelError(
                    f"layer '{name}' is {type(layer).__name__}, which is not supported: {reason}. "
                    "Use GroupNorm or LayerNorm, or no such layer."
                )
    for path, layer in module.named_modules():
        for key, value in () if isinstance(layer, BatchNorm) else layer._buffers.items():
            if value is not None:
                raise ModelError(
                    f"the model keeps the buffer '{path}.{key}' {list(value.shape)}; only the running statistics of BatchNorm "
                    "layers are supported."
                )


def _values_in(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _cut(module: nn.Module, at: str) -> tuple[nn.Module, nn.Module]:
    """Return (body, head) of a module, the head beginning at the layer `at`. Both share the module's parameters."""
    names = [name for name, _ in module.named_modules()]
    if at not in names or not at:
        raise ModelError(
            f"the model has no layer '{at}' to cut at. Layers with parameters: {', '.join(_layers(module))}."
        )
    if _in_a_row(module, at):
        children = list(module.named_children())
        here = [name for name, _ in children].index(at)
        body, rest = nn.Sequential(), children[here:]
        for name, child in children[:here]:
            body.add_module(name, child)
        if len(rest) == 1:
            return body, rest[0][1]
        head = nn.Sequential()
        for name, child in rest:
            head.add_module(name, child)
        return body, head
    head = module.get_submodule(at)
    body = _shallow(module, at)
    return body, head


def _in_a_row(module: nn.Module, at: str) -> bool:
    """Return whether `at` is one of the layers that the module runs one after the other."""
    return isinstance(module, nn.Sequential) and at in dict(module.named_children())


def _insert(module: nn.Module, at: str, within: str, name: str, layer: nn.Module) -> None:
    """Put a layer before the layer `at`, into the module's row of layers, or else (`within`) into a row of two in its place."""
    last = at.rpartition(".")[2]
    if within:
        parent = module.get_submodule(at.rpartition(".")[0])
        parent._modules[last] = nn.Sequential(OrderedDict([(name, layer), (last, module.get_submodule(at))]))
        return
    layers = list(module._modules.items())
    module._modules.clear()
    for key, child in layers:
        module._modules |= {name: layer, key: child} if key == at else {key: child}


def _shallow(module: nn.Module, at: str) -> nn.Module:
    """Return a copy of the module that shares its parameters and has the identity in place of the layer `at`."""
    first, _, rest = at.partition(".")
    twin = copy.copy(module)
    twin._modules = dict(module._modules)
    child = module.get_submodule(first)
    twin._modules[first] = _shallow(child, rest) if rest else nn.Identity()
    return twin
