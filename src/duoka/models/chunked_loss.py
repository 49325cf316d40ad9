"""The head and the loss in chunks: the logits of all tokens are the largest tensor in training.

The output embedding returns lazy logits. Operations on each row alike are recorded:

    logits = head(hidden)          LazyLogits(hidden, steps=())
    logits.float()[:-1]            LazyLogits(hidden[:-1], steps=(float,))
    cross_entropy(logits, target)  computes some rows of logits at a time

Cross entropy computes the logits once more in its backward pass. Any other operation computes all
logits first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from duoka.forecast.workload import loss_chunk_tokens


class ChunkedHead:
    """Replaces an output embedding's `forward`.

    `chunk_begins` is called with the number of each chunk, and with None behind the last chunk.
    """

    def __init__(self, head: nn.Module, num_columns: int) -> None:
        self.head = head
        self.num_columns = num_columns
        self.chunk_begins: Callable[[int | None], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return lazy logits."""
        if kwargs or len(args) != 1 or args[0].dim() < 2 or args[0].is_meta:
            return self.compute(*args, **kwargs)
        [hidden] = args
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        recipe = _Recipe(self, (), autocast, autocast or hidden.dtype, hidden.device)
        return LazyLogits.of(hidden, recipe)

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the head."""
        logits: Tensor = type(self.head).forward(self.head, *args, **kwargs)
        return logits

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield the rows of each chunk."""
        chunk_begins = self.chunk_begins or (lambda number: None)
        size = loss_chunk_tokens(num_rows)
        for number, start in enumerate(range(0, num_rows, size)):
            chunk_begins(number)
            yield slice(start, start + size)
        chunk_begins(None)


def chunk_loss(model: nn.Module) -> None:
    """Let a model's own loss compute its head in chunks, where that is a linear layer."""
    try:
        head: Any = cast(Any, model).get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return
    num_columns = getattr(head, "out_features", None)
    # A chunk that is computed again would drop other elements.
    drops = isinstance(head, nn.Module) and any(
        isinstance(part, nn.Dropout) and part.p > 0 for part in head.modules()
    )
    if isinstance(num_columns, int) and not drops:
        head.forward = ChunkedHead(head, num_columns)


def chunked_head(model: nn.Module) -> ChunkedHead | None:
    """Return the replacement of a model's head, where its loss is computed in chunks."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((forward for forward in forwards if isinstance(forward, ChunkedHead)), None)


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Let the head compute all logits at once, inside the scope."""
    chunked: Any = chunked_head(model)
    if chunked is not None:
        del chunked.head.forward
    try:
        yield
    finally:
        if chunked is not None:
            chunked.head.forward = chunked


class _Recipe(NamedTuple):
    """The computation of logits: a head, then recorded operations on each row."""

    source: ChunkedHead
    steps: tuple[Callable[[Tensor], Tensor], ...]
    autocast: torch.dtype | None
    dtype: torch.dtype
    device: torch.device

    def autocasting(self, hidden: Tensor) -> torch.autocast:
        """Return autocast as in the head's call, without a cache of weights."""
        kind, is_on = hidden.device.type, self.autocast is not None
        return torch.autocast(kind, dtype=self.autocast, enabled=is_on, cache_enabled=False)

    def compute(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., columns] from hidden states [..., width]."""
        logits = self.source.compute(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits


class LazyLogits(Tensor):
    """Logits computed at their first use."""

    hidden: Tensor
    recipe: _Recipe
    computed: Tensor | None

    @staticmethod
    def of(hidden: Tensor, recipe: _Recipe) -> LazyLogits:
        """Make the lazy logits of hidden states."""
        lazy: LazyLogits = Tensor._make_wrapper_subclass(
            LazyLogits,
            (*hidden.shape[:-1], recipe.source.num_columns),
            dtype=recipe.dtype,
            device=recipe.device,
            requires_grad=torch.is_grad_enabled(),
        )
        lazy.hidden, lazy.recipe, lazy.computed = hidden, recipe, None
        return lazy

    def compute_all(self) -> Tensor:
        """Compute all logits, once."""
        if self.computed is None:
            is_recorded = bool(self.requires_grad)
            with torch.set_grad_enabled(is_recorded), self.recipe.autocasting(self.hidden):
                self.computed = self.recipe.compute(self.hidden)
        return self.computed

    # Three outcomes for a function of lazy logits: an attribute is answered from the wrapper's
    # metadata; a function of rows returns lazy logits with one more step; everything else, and any
    # function after a first materialization, gets the computed logits (`__torch_dispatch__`).
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FACTS:
            inherited: Any = super()  # without types there
            return inherited.__torch_function__(func, types, args, kwargs)
        logits = args[0] if args else None
        # Computed logits may have been written to.
        if isinstance(logits, LazyLogits) and logits.computed is None:
            result = logits._apply_lazily(func, args[1:], kwargs)
            if result is not None:
                return result
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.compute_all, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _apply_lazily(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a function lazily; return None if impossible."""
        if func is cross_entropy:
            return _loss(self, *args, **kwargs)
        if func in _SHAPING and not kwargs:
            hidden = _reshaped(self, func, args)
            return None if hidden is None else LazyLogits.of(hidden, self.recipe)
        options = (*args, *kwargs.values())
        kinds = _STEPS.get(func)
        if kinds is None or not all(isinstance(option, kinds) for option in options):
            return None
        recipe = self.recipe
        dtypes = [option for option in options if isinstance(option, torch.dtype)]
        devices = [option for option in options if isinstance(option, (str, torch.device))]
        changed = recipe._replace(
            steps=(*recipe.steps, lambda logits: func(logits, *args, **kwargs)),
            dtype=torch.float32 if func is Tensor.float else (*dtypes, recipe.dtype)[0],
            device=torch.device((*devices, recipe.device)[0]),
        )
        return LazyLogits.of(self.hidden, changed)


_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta")
# Attributes of lazy logits.
_FACTS = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_FACTS |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
# Operations on each row alike, with the types of their arguments.
_STEPS: dict[Any, tuple[type, ...]] = {
    Tensor.float: (),
    Tensor.to: (bool, str, torch.dtype, torch.device),
    **dict.fromkeys((Tensor.mul, Tensor.div, torch.mul, torch.div), (int, float)),
    **dict.fromkeys((Tensor.tanh, torch.tanh), ()),
}
_SHAPING = frozenset({Tensor.view, Tensor.reshape, Tensor.__getitem__, Tensor.contiguous})


# A row of logits follows from the same row of hidden states, so an index or a view that leaves the
# columns whole can be applied to the hidden states. For logits [batch, tokens, 32000]:
#
#   logits[:, :-1]               hidden[:, :-1]
#   logits[..., :-1, :]          hidden[..., :-1, :]        the last index takes all columns
#   logits.view(-1, 32000)       hidden.reshape(-1, width)
#   logits[..., :100]            None                       a part of the columns
#   logits[mask]                 None                       only numbers and slices are followed
#
# This covers transformers' `ForCausalLMLoss`: float(), view(-1, vocab_size), cross_entropy.
def _reshaped(logits: LazyLogits, func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Reshape the hidden states as the logits are; return None where columns change as well."""
    hidden = logits.hidden
    if func is Tensor.contiguous:
        return hidden
    if func is Tensor.__getitem__:
        index = args[0] if isinstance(args[0], tuple) else args
        named = [part for part in index if part is not ...]
        if any(type(part) not in (int, slice) for part in named):
            return None
        ends_in_columns = len(named) < len(index) and index[-1] is not ...
        if len(named) == logits.dim() or ends_in_columns:
            return hidden[index] if named[-1] == slice(None) else None
        return hidden[index]
    sizes = args[0] if isinstance(args[0], (tuple, list)) else args
    if not sizes or sizes[-1] != logits.shape[-1]:
        return None
    return hidden.reshape(*sizes[:-1], hidden.shape[-1])


def _loss(
    logits: LazyLogits,
    target: Any,
    *rest: Any,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **rare: Any,
) -> Tensor | None:
    """Compute cross entropy of tokens in chunks; return None for other kinds."""
    is_plain = all(option is None for option in (*rest, *rare.values())) and not label_smoothing
    if not is_plain or reduction not in ("mean", "sum"):
        return None
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        return None
    # Gradients of the head are summed up over chunks, so its parameters are inputs of the function.
    trained = [p for p in logits.recipe.source.head.parameters() if p.requires_grad]
    loss: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
        logits.recipe, ignore_index, target, logits.hidden, *trained
    )
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss.to(logits.dtype)


# With hidden states H [tokens, width], a head W and chunks c of rows, the loss is a sum over c, so
# dL/dH[c] depends on chunk c alone and dL/dW is the sum of the chunks' gradients:
#
#   forward    for c: logits_c = head(H[c]); total += cross_entropy(logits_c)   (no graph is kept)
#   backward   for c: logits_c again, with a graph; dH[c] = …; dW += …
#
# At most one chunk of logits and of its gradient exists at a time: [rows, vocabulary] instead of
# [tokens, vocabulary]. For 8,192 tokens and a vocabulary of 151,552 in 32 bit that is 0.58 GiB for
# 1,024 rows instead of 4.6 GiB, each of logits and gradient. The price is a second product with
# the head.
class _ChunkedSum(torch.autograd.Function):
    """The sum of cross entropy over all rows, in 32 bit; its backward recomputes the chunks.

    Gradients made in the forward pass would be held for every micro-batch in flight, and in fp16
    they need the scale of the loss, which isn't known then.
    """

    @staticmethod
    def forward(
        ctx: Any, recipe: _Recipe, ignore_index: int, target: Tensor, hidden: Tensor, *rest: Tensor
    ) -> Tensor:
        ctx.recipe, ctx.ignore_index = recipe, ignore_index
        ctx.save_for_backward(target, hidden, *rest)
        total = torch.zeros((), dtype=torch.float32, device=recipe.device)
        with recipe.autocasting(hidden):
            for rows in recipe.source.chunks(len(hidden)):
                total += _sum(recipe, hidden[rows], target[rows], ignore_index)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        target, hidden, *trained = ctx.saved_tensors
        needs_hidden = ctx.needs_input_grad[3]
        back = torch.empty_like(hidden) if needs_hidden else None
        sums = [torch.zeros_like(parameter) for parameter in trained]

        def add(rows: slice) -> None:
            # In a function, so that all of a chunk is freed when the next chunk begins.
            part = hidden[rows].detach().requires_grad_(needs_hidden)
            with torch.enable_grad(), ctx.recipe.autocasting(hidden):
                loss = _sum(ctx.recipe, part, target[rows], ctx.ignore_index)
            inputs = [part, *trained] if needs_hidden else trained
            parts = list(torch.autograd.grad(loss, inputs, gradients[0]))
            if back is not None:
                back[rows] = parts.pop(0)
            for total, gradient in zip(sums, parts, strict=True):
                total += gradient

        for rows in ctx.recipe.source.chunks(len(hidden)):
            add(rows)
        return None, None, None, back, *sums


def _sum(recipe: _Recipe, hidden: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    logits = recipe.compute(hidden).float()
    return cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
