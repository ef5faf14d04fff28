"""The table of routes: for every trainable parameter, how its per-sample gradient is had.

A *block* is a set of parameters that share one linear map (a layer's weight and bias, a matrix
tied between two modules). Every trainable parameter is in exactly one block or is refused by name.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch
from opacus.grad_sample import GradSampleModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from transformers.pytorch_utils import Conv1D

from hf_dpkfc.errors import ConfigurationError, UnsupportedLayerError


class Kind(StrEnum):
    """How one module uses its parameters."""

    LINEAR = "linear"
    CONV1D = "conv1d"  # transformers' Conv1D: a Linear whose weight is stored [d_in, d_out]
    CONV2D = "conv2d"
    EMBEDDING = "embedding"
    SAMPLER = "grad sampler"  # registered with Opacus: norms, Conv1d, the user's own
    VJP = "vjp"  # small leaf module, its own forward differentiated example by example
    BROADCAST = "broadcast"  # bare parameter of shape [1, ...], given to each example on its own


class Form(StrEnum):
    """Which form of :mod:`hf_dpkfc.layers.gradients` a block's gradient takes."""

    OUTER = "outer"
    ROWS = "rows"
    TIED = "tied"
    DENSE = "dense"


OUTER_KINDS = {Kind.LINEAR, Kind.CONV1D, Kind.CONV2D}

_NOTHING_TRAINS = "No parameter of the model trains: all are frozen."

# A leaf module with more parameters than this isn't differentiated example by example.
MAX_VJP_PARAMETERS = 2**20


@dataclass(frozen=True)
class Use:
    """One module's use of a block; ``covers_*`` say which of its parameters the block owns."""

    module: str
    kind: Kind
    covers_weight: bool = True
    covers_bias: bool = False


@dataclass(frozen=True)
class Block:
    """Parameters under one linear map.

    Attributes:
        name: The module's name, or the parameter's where it stands alone.
        form: The form of its per-sample gradient.
        uses: The modules that use it.
        parameters: Name and shape of each parameter, in the order of the gradient's columns.
        treatment: "kfac" where Kronecker factors apply, else "scaled".
        transposed: The weight is stored [d_in, d_out].
    """

    name: str
    form: Form
    uses: tuple[Use, ...]
    parameters: Mapping[str, tuple[int, ...]]
    treatment: str
    transposed: bool = False

    @property
    def has_weight(self) -> bool:
        """False for a block that is only a bias column."""
        return self.uses[0].covers_weight

    def split(self, total: Tensor) -> dict[str, Tensor]:
        """A sum in the gradient's own shape, as one tensor per parameter."""
        names = list(self.parameters)
        if self.form is Form.DENSE:
            sizes = [_numel(self.parameters[name]) for name in names]
            flat = total.flatten().split(sizes)
            return {n: part.view(self.parameters[n]) for n, part in zip(names, flat, strict=True)}
        parts: dict[str, Tensor] = {}
        if self.has_weight:
            columns = _numel(self.parameters[names[0]]) // len(total)
            weight = total[:, :columns]
            weight = weight.mT if self.transposed else weight
            parts[names[0]] = weight.reshape(self.parameters[names[0]])
        if self.uses[0].covers_bias:
            parts[names[-1]] = total[:, -1].reshape(self.parameters[names[-1]])
        return parts

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The inverse of :meth:`split`."""
        names = list(self.parameters)
        if self.form is Form.DENSE:
            return torch.cat([parts[name].flatten() for name in names])
        columns = []
        if self.has_weight:
            weight = parts[names[0]]
            columns.append(weight.mT if self.transposed else weight.flatten(1))
        if self.uses[0].covers_bias:
            columns.append(parts[names[-1]].view(-1, 1))
        return torch.cat(columns, dim=1)


@dataclass(frozen=True)
class Refusal:
    """A trainable parameter without a rule, and why."""

    parameter: str
    why: str
    way_out: str


@dataclass(frozen=True)
class RouteTable:
    """Every trainable parameter's route; prints as a table."""

    blocks: tuple[Block, ...]
    refusals: tuple[Refusal, ...] = field(default=())

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def require_covered(self) -> RouteTable:
        """The table itself, if nothing is refused and something trains.

        Raises:
            UnsupportedLayerError: Naming every refused parameter.
            ConfigurationError: If every parameter is frozen.
        """
        if self.refusals:
            first = self.refusals[0]
            names = ", ".join(r.parameter for r in self.refusals)
            raise UnsupportedLayerError(
                f"No exact per-sample gradient for: {names}.",
                why=first.why,
                way_out=first.way_out,
            )
        if not self.blocks:
            raise ConfigurationError(
                _NOTHING_TRAINS,
                why="there is no gradient, so a step would be charged and change nothing.",
                way_out="unfreeze a part of it with requires_grad_(True), for instance its head, "
                "or add LoRA with peft.get_peft_model.",
            )
        return self

    def __str__(self) -> str:
        if not self.blocks and not self.refusals:
            return _NOTHING_TRAINS
        rows = [("parameter", "shape", "route", "treatment")]
        for block in self.blocks:
            kinds = " + ".join(dict.fromkeys(use.kind.value for use in block.uses))
            rows += [
                (name, "×".join(map(str, shape)) or "scalar", kinds, block.treatment)
                for name, shape in block.parameters.items()
            ]
        rows += [(r.parameter, "", "refused", r.why) for r in self.refusals]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(
            "  ".join(
                [*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]
            )
            for row in rows
        )


def inspect_model(model: nn.Module) -> RouteTable:
    """The table of routes, refusals included; ``print`` it to see what training would do."""
    return _TableBuilder(model).build()


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


class _TableBuilder:
    """Sorts trainable parameters into blocks; lives only while the table is built."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.names = {id(p): n for n, p in model.named_parameters() if p.requires_grad}
        self.owners: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for module_name, module in self.modules.items():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if parameter.requires_grad:
                    self.owners[id(parameter)].append((module_name, name))
        self.vocabulary = _output_embedding_names(model, self.modules)
        self.blocks: list[Block] = []
        self.refusals: list[Refusal] = []
        self.done: set[int] = set()

    def build(self) -> RouteTable:
        self._refuse_batch_statistics()
        for key, name in self.names.items():
            if key not in self.done:
                self._route(key, name)
        return RouteTable(tuple(self.blocks), tuple(self.refusals))

    def _refuse_batch_statistics(self) -> None:
        for name, module in self.modules.items():
            tracks = isinstance(module, _InstanceNorm) and module.track_running_stats
            if isinstance(module, _BatchNorm) or tracks:
                self.refusals.append(
                    Refusal(
                        f"{name} ({type(module).__name__})",
                        "it mixes the examples of a batch and keeps running statistics of private "
                        "records without noise, also when its parameters are frozen.",
                        "replace it by GroupNorm, for example with "
                        "opacus.validators.ModuleValidator.fix(model).",
                    )
                )

    def _route(self, key: int, name: str) -> None:
        """Put one parameter, and those that belong to the same map, into a block."""
        uses = [(m, p, k) for m, p in self.owners[key] if (k := self._kind(m, p)) is not None]
        real = [u for u in uses if u[2] is not Kind.BROADCAST] or uses
        kinds = {kind for *_, kind in real}
        if any(isinstance(self.modules[m], _BatchNorm) for m, _ in self.owners[key]):
            self.done.add(key)  # refused already, with its module
        elif not real:
            self._refuse(key, name)
        elif (other := self._layer_without_rule(key)) is not None:
            self._refuse(key, name, f"{other} computes something of its own with it")
        elif kinds <= OUTER_KINDS:
            self._route_outer(key, name, real)
        elif kinds == {Kind.EMBEDDING}:
            self._add(key, name, Form.ROWS, [Use(m, k) for m, _, k in real])
        elif kinds == {Kind.EMBEDDING, Kind.LINEAR}:
            self._add(key, name, Form.TIED, [Use(m, k) for m, _, k in real])
        elif len({m for m, *_ in real}) == 1:
            self._route_dense(real[0][0], real[0][1], real[0][2])
        else:
            self._refuse(key, name, "it is shared between modules of different kinds")

    def _layer_without_rule(self, key: int) -> str | None:
        """A layer that uses the parameter otherwise than its base class does (Gemma's embedding).

        Other owners without a rule only hold a name for it.
        """
        for module_name, parameter_name in self.owners[key]:
            module = self.modules[module_name]
            is_layer = isinstance(module, tuple(_KNOWN))
            if is_layer and self._kind(module_name, parameter_name) is None:
                return f"{module_name} ({type(module).__name__})"
        return None

    def _kind(self, module_name: str, parameter_name: str) -> Kind | None:
        """The rule for one module's direct use of a parameter, None if there is none."""
        module = self.modules[module_name]
        for base, kind in _KNOWN.items():
            # A subclass that computes something else, or has more parameters, isn't that layer.
            is_plain = isinstance(module, base) and type(module).forward is base.forward
            if is_plain and parameter_name in ("weight", "bias"):
                return kind if _has_plain_gradient(module) else None
        # Opacus' samplers read all parameters of their layer, also one that was left out.
        is_whole = all(parameter is not None for parameter in module._parameters.values())
        if is_whole and type(module) in GradSampleModule.GRAD_SAMPLERS:
            return Kind.SAMPLER
        if _is_small_leaf(module):
            return Kind.VJP
        shape = module._parameters[parameter_name].shape
        return Kind.BROADCAST if len(shape) > 1 and shape[0] == 1 else None

    def _route_outer(self, key: int, name: str, uses: list[tuple[str, str, Kind]]) -> None:
        modules = [self.modules[m] for m, *_ in uses]
        if len({(k, type(m)) for m, (*_, k) in zip(modules, uses, strict=True)}) > 1:
            self._refuse(key, name, "it is shared between layers that store it differently")
        elif len(uses) > 1 or uses[0][1] == "bias":
            is_bias = uses[0][1] == "bias"
            built = [Use(m, k, covers_weight=not is_bias, covers_bias=is_bias) for m, _, k in uses]
            self._add(key, name, Form.OUTER, built)
        else:
            self._add_layer(uses[0][0], uses[0][2])

    def _add_layer(self, module_name: str, kind: Kind) -> None:
        """A layer's weight, and its bias if that trains and is no other module's too."""
        module = self.modules[module_name]
        bias = module._parameters.get("bias")
        own_bias = bias is not None and bias.requires_grad and self._sole_rule(bias)
        parameters = {self.names[id(module.weight)]: tuple(module.weight.shape)}
        if own_bias:
            assert bias is not None
            parameters[self.names[id(bias)]] = tuple(bias.shape)
            self.done.add(id(bias))
        self.done.add(id(module.weight))
        use = Use(module_name, kind, covers_bias=own_bias)
        self._append(module_name, Form.OUTER, [use], parameters)

    def _sole_rule(self, parameter: nn.Parameter) -> bool:
        ruled = [m for m, p in self.owners[id(parameter)] if self._kind(m, p) is not None]
        return len(ruled) == 1

    def _route_dense(self, module_name: str, parameter_name: str, kind: Kind) -> None:
        module = self.modules[module_name]
        mine = {parameter_name} if kind is Kind.BROADCAST else None
        own = {
            n: p
            for n, p in module.named_parameters(recurse=False)
            if p.requires_grad and (mine is None or n in mine)
        }
        self.done.update(id(p) for p in own.values())
        shapes = {self.names[id(p)]: tuple(p.shape) for p in own.values()}
        name = next(iter(shapes)) if kind is Kind.BROADCAST else module_name
        self._append(name, Form.DENSE, [Use(module_name, kind)], shapes)

    def _add(self, key: int, name: str, form: Form, uses: list[Use]) -> None:
        self.done.add(key)
        module_name, parameter_name = self.owners[key][0]
        parameter = self.modules[module_name]._parameters[parameter_name]
        assert parameter is not None
        self._append(name, form, uses, {name: tuple(parameter.shape)})

    def _append(
        self, name: str, form: Form, uses: list[Use], parameters: Mapping[str, tuple[int, ...]]
    ) -> None:
        is_vocabulary = any(use.module in self.vocabulary for use in uses)
        is_kfac = form is Form.OUTER and not is_vocabulary
        transposed = uses[0].kind is Kind.CONV1D
        treatment = "kfac" if is_kfac else "scaled"
        self.blocks.append(Block(name, form, tuple(uses), dict(parameters), treatment, transposed))

    def _refuse(self, key: int, name: str, why: str | None = None) -> None:
        self.done.add(key)
        module = self.modules[self.owners[key][0][0]]
        self.refusals.append(
            Refusal(
                name,
                why
                or f"{type(module).__name__} has no rule for it, so its share of the gradient "
                "would escape the clip norm.",
                "freeze it with requires_grad_(False), or register a rule with "
                "opacus.grad_sample.register_grad_sampler.",
            )
        )


_KNOWN: dict[type[nn.Module], Kind] = {
    Conv1D: Kind.CONV1D,
    nn.Embedding: Kind.EMBEDDING,
    nn.Linear: Kind.LINEAR,
    nn.Conv2d: Kind.CONV2D,
}


def _has_plain_gradient(module: nn.Module) -> bool:
    """False for embeddings whose gradient or weight torch changes on its own."""
    if not isinstance(module, nn.Embedding):
        return True
    return not (module.scale_grad_by_freq or module.sparse or module.max_norm)


def _is_small_leaf(module: nn.Module) -> bool:
    """A childless module of one tensor argument, small enough to differentiate per example."""
    stateful = nn.RNNBase | _BatchNorm | nn.Embedding
    if next(module.children(), None) is not None or isinstance(module, stateful):
        return False
    if sum(p.numel() for p in module.parameters()) > MAX_VJP_PARAMETERS:
        return False
    required = [
        p
        for p in inspect.signature(module.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(required) == 1


def _output_embedding_names(model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Names of the language-model head: a vocabulary wide, too wide for factors."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    return {name for name, module in modules.items() if module is head and head is not None}
