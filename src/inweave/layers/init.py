"""New adapters: their modules, ranks, scales and initial values.

rank, alpha   of a module: from the first pattern that matches its name, else the adapter's
scale         alpha / rank, alpha / sqrt(rank) with rslora, 1 without alpha
              1 on a LoKr module where both factors are full: it has no rank to divide by (`inweave.adapter.scale`)
magnitude     with dora: the norms of the weight's rows, so that the layer's output is initially unchanged
network       the algorithm, see `inweave.layers.algorithms`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn

from inweave.errors import ConfigError
from inweave.formats.config import PeftConfig
from inweave.layers.algorithms import branch_named, dropout_problem, networks, parameter_branch
from inweave.layers.branch import Branch, Start
from inweave.layers.eligible import layer_kind
from inweave.layers.hosts import ParameterHost
from inweave.layers.layer import LoraLayer
from inweave.layers.match import ALL_LINEAR, Targets, check_patterns, matching
from inweave.layers.sites import Site
from inweave.layers.spec import DROPOUTS, AdapterSpec
from inweave.ops.quantized import QuantizedLayer, weight_like
from inweave.ops.tensors.subclasses import whole

_MAX_RANK = 2**20
#: attribute of a model -> words in the name of the model's class
_HEADS = {
    "classifier": ("SequenceClassification", "TokenClassification", "ImageClassification", "AudioClassification"),
    "score": ("SequenceClassification", "TokenClassification"),
    "qa_outputs": ("QuestionAnswering",),
}


@dataclass(frozen=True, slots=True)
class Request:
    """The arguments of an `inject` call."""

    rank: int
    alpha: float | None
    spec: AdapterSpec
    rules: PeftConfig  # the rank and alpha of each module, by PEFT's rules

    @classmethod
    def of(cls, rank: int, alpha: float | None, spec: AdapterSpec) -> Request:
        rules = PeftConfig(rank=rank, alpha=alpha, rank_pattern=spec.rank_pattern, alpha_pattern=spec.alpha_pattern)
        return cls(rank, alpha, spec, rules)

    def problems(self) -> list[str]:
        """Return every problem that does not depend on the model."""
        spec = self.spec
        ranks = (self.rank, *spec.rank_pattern.values())
        alphas = (self.alpha, *spec.alpha_pattern.values())
        problems = [
            f"rank must be a positive whole number, got {rank!r}"
            for rank in ranks
            if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK
        ]
        problems += [
            f"alpha must be a finite number other than 0, got {alpha!r}"
            for alpha in alphas
            if alpha is not None and not (isinstance(alpha, int | float) and 0 < abs(alpha) < 1e30)
        ]
        if spec.rslora and self.alpha is None:
            problems.append("rslora scales by alpha / sqrt(rank): give alpha")
        known = spec.network in networks()
        if not known:
            problems.append(f"network must be one of {', '.join(networks())}, got {spec.network!r}")
        else:
            problems += _foreign_options(spec)
        problems += [
            f"{name} must be True or False, got {value!r}"
            for name in ("dora", "rslora", "decompose_both")
            if not isinstance(value := getattr(spec, name), bool)
        ]
        if type(spec.seed) is not int:
            problems.append(f"seed must be a whole number, got {spec.seed!r}")
        if type(spec.factor) is not int or spec.factor == 0 or spec.factor < -1:
            problems.append(
                f"factor must be a positive whole number, or -1 for the most even split, got {spec.factor!r}"
            )
        rates = {name: getattr(spec, name) for name in DROPOUTS}
        if known and (reason := dropout_problem(spec.network, spec.dora, rates)):
            problems.append(reason)
        return problems + check_common(rates, spec.dtype)


def _foreign_options(spec: AdapterSpec) -> list[str]:
    """Return a message for each option that was set but belongs to another algorithm."""
    own = branch_named(spec.network).options
    changed = {each.name for each in fields(spec) if getattr(spec, each.name) != getattr(AdapterSpec(), each.name)}
    return [
        f"{' and '.join(sorted(options))} belong to {network}; {spec.network} does not use them"
        for network in networks()
        if network != spec.network and (options := (branch_named(network).options - own) & changed)
    ]


def check_common(dropouts: Mapping[str, float], dtype: torch.dtype | None) -> list[str]:
    """Return the problems of options that new and loaded adapters have in common."""
    problems = [
        f"{name} must be at least 0 and below 1, got {rate!r}"
        for name, rate in dropouts.items()
        if not (isinstance(rate, int | float) and 0 <= rate < 1)
    ]
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        problems.append(f"dtype must be a floating-point torch.dtype, got {dtype!r}")
    return problems


def select_sites(
    model: nn.Module,
    all_sites: list[Site],
    targets: Targets,
    request: Request,
    exclude: Targets = (),
    *,
    allow_none: bool = False,
) -> list[Site]:
    """Return the sites that ``targets`` names without those of ``exclude``, in the model's order.

    Raises:
        ConfigError: every problem of the arguments.
    """
    problems = request.problems()
    able = [site for site in all_sites if site.parents and layer_kind(site.module) is not None]
    if isinstance(targets, str) and targets.lower() == ALL_LINEAR:
        left_out = {
            id(part)
            for head in (_output_head(model), classification_head(model), *_tied_heads(model))
            if head
            for part in head.modules()
        }
        chosen = [
            site
            for site in able
            if _is_linear(site)
            and id(site.module) not in left_out
            and not any(isinstance(parent, ParameterHost) for parent, _ in site.parents)
            # compiled or fused modules are refused later, since the user can undo both
            and (site.unused() is None or site.compiled() or site.fused())
        ]
        if not chosen:
            problems.append("'all-linear' matches no Linear layer in this model; name the targets instead")
    else:
        by_name = {name: site for site in all_sites for name in site.names if name}
        hits: list[str] = []
        try:
            hits = (
                []
                if targets in ((), []) and allow_none
                else matching(targets, by_name, [name for site in able for name in site.names])
            )
        except ConfigError as error:
            problems.extend(map(str, error.problems))
        chosen = list({id(by_name[hit]): by_name[hit] for hit in hits}.values())
    if chosen and (isinstance(exclude, re.Pattern) or exclude):
        names = [name for site in chosen for name in site.names]
        try:
            left_out_names = set(matching(exclude, names, names, "exclude"))
        except ConfigError as error:
            problems.extend(map(str, error.problems))
        else:
            chosen = [site for site in chosen if left_out_names.isdisjoint(site.names)]
            if not chosen:
                problems.append("exclude leaves nothing of the targets")
    if chosen and not allow_none:
        names = [name for site in chosen for name in site.names]
        problems += check_patterns("rank_pattern", request.spec.rank_pattern, names)
        problems += check_patterns("alpha_pattern", request.spec.alpha_pattern, names)
    if problems:
        raise ConfigError(problems)
    return chosen


def _is_linear(site: Site) -> bool:
    kind = layer_kind(site.module)
    return kind is not None and kind.linear


def classification_head(model: nn.Module) -> nn.Module | None:
    """Return the head of a transformers model for classification or question answering, or None.

    It is newly initialized, so "all-linear" skips it and `inject` trains it whole, as PEFT does with
    `modules_to_save`.
    """
    kinds = [kind.__name__ for kind in type(model).__mro__] + [type(getattr(model, "_orig_mod", model)).__name__]
    for name, words in _HEADS.items():
        head = getattr(model, name, None)
        if isinstance(head, nn.Module) and any(word in kind for kind in kinds for word in words):
            return head
    return None


def unreachable_experts(model: nn.Module) -> list[str]:
    """Return the parameters of fused experts (experts, out, in), which are not layers: "all-linear" skips them."""
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and "expert" in name and not name.endswith((".bias", ".scale"))
    ]


def _output_head(model: nn.Module) -> nn.Module | None:
    """Return the output layer of a transformers model, which "all-linear" skips, as PEFT does, or None."""
    method = getattr(model, "get_output_embeddings", None)
    head = method() if callable(method) else None
    return head if isinstance(head, nn.Module) else None


def _tied_heads(model: nn.Module) -> list[nn.Module]:
    """Return the output layers of networks inside the model, tied to their embeddings: BLIP's decoder."""
    heads: list[nn.Module] = []
    for module in model.modules():
        head, inputs = _output_head(module), getattr(module, "get_input_embeddings", None)
        if head is not None and callable(inputs) and module is not model:
            if getattr(inputs(), "weight", None) is getattr(head, "weight", model):
                heads.append(head)
    return heads


def fresh_branch(layer: LoraLayer, request: Request, attention: str = "") -> Branch:
    """Return a new adapter's branch for ``layer``; its values are seeded by the module's first name.

    ``attention``: the MultiheadAttention of which this is a projection. It has one rank and alpha, and the change of
    out_proj counts twice, since PEFT (to 0.21) adds it twice: so the file has the same effect there.
    """
    name, spec, rules = layer.names[0], request.spec, request.rules
    weight = weight_like(layer.base) if isinstance(layer.base, QuantizedLayer) else layer.weight.detach()
    rank, alpha = rules.rank_of(attention or name), rules.alpha_of(attention or name)
    assert rank is not None
    if attention and name.endswith(".out_proj"):
        alpha = 2 * (rank if alpha is None else alpha)
    wide = torch.float32 if weight.dtype.itemsize == 1 else torch.promote_types(weight.dtype, torch.float32)
    dtype = spec.dtype or wide  # float8 has no promotion
    branch = parameter_branch() if layer.geometry.experts else branch_named(spec.network)
    if layer.geometry.experts and (spec.dora or not branch_named(spec.network).is_pair):
        raise ConfigError(f"{layer.label}: a bare parameter takes plain LoRA only")
    start = Start(layer.geometry, rank, request.rank, spec, name, layer.device, dtype)
    return branch.fresh(
        start,
        magnitude=_row_norms(layer, dtype) if spec.dora else None,
        alpha=alpha,
        rslora=spec.rslora,
        dropout=spec.dropout,
        hidden_dropout=spec.hidden_dropout,
        rank_dropout=spec.rank_dropout,
        module_dropout=spec.module_dropout,
        output_dropout=spec.output_dropout,
    )


def _row_norms(layer: LoraLayer, dtype: torch.dtype) -> torch.Tensor:
    rows = layer.rows(whole(layer.numbers().detach()))
    norms: torch.Tensor = torch.linalg.vector_norm(rows.to(torch.promote_types(dtype, torch.float32)), dim=1)
    return norms.to(layer.device, dtype)
