"""Output head and cross entropy in chunks of tokens, without the logits of all tokens at once.

The logits of all tokens are the largest tensor in training. So the output embedding returns lazy
logits, which record row-wise operations:

    logits = head(hidden)          LazyLogits(hidden, steps=())
    logits.float()[:-1]            LazyLogits(hidden[:-1], steps=(float,))
    cross_entropy(logits, target)  computes the logits of one chunk of rows at a time

The backward pass of cross entropy recomputes the logits. Any other operation materializes the full
logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only

from duoka.forecast.workload import loss_chunk_tokens


class ChunkedHead:
    """Replaces the `forward` of an output embedding by a function that returns lazy logits.

    `chunk_begins` is called with each chunk's index, and with None after the last chunk.
    """

    def __init__(self, head: nn.Module, num_columns: int) -> None:
        self.head = head
        self.num_columns = num_columns
        self.chunk_begins: Callable[[int | None], None] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return lazy logits, or computed logits for unusual arguments and on the meta device."""
        if kwargs or len(args) != 1 or args[0].dim() < 2 or args[0].is_meta:
            return self.compute(*args, **kwargs)
        [hidden] = args
        kind = hidden.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        recipe = _Recipe(self, (), autocast, autocast or hidden.dtype, hidden.device)
        return LazyLogits.of(hidden, recipe)

    def compute(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute logits by the original `forward` of the head."""
        logits: Tensor = type(self.head).forward(self.head, *args, **kwargs)
        return logits

    def chunks(self, num_rows: int) -> Iterator[slice]:
        """Yield the slice of rows of each chunk, and report each chunk to `chunk_begins`."""
        chunk_begins = self.chunk_begins or (lambda number: None)
        size = loss_chunk_tokens(num_rows)
        for number, start in enumerate(range(0, num_rows, size)):
            chunk_begins(number)
            yield slice(start, start + size)
        chunk_begins(None)


def chunk_loss(model: nn.Module) -> None:
    """Make the loss of a model compute the output head in chunks of tokens.

    Models without a linear output head, or with dropout in the head, stay unchanged.
    """
    try:
        head: Any = cast(Any, model).get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return
    num_columns = getattr(head, "out_features", None)
    # With dropout, a recomputed chunk would drop other elements than in the forward pass.
    drops = isinstance(head, nn.Module) and any(
        isinstance(part, nn.Dropout) and part.p > 0 for part in head.modules()
    )
    if isinstance(num_columns, int) and not drops:
        head.forward = ChunkedHead(head, num_columns)


def chunked_head(model: nn.Module) -> ChunkedHead | None:
    """Return the `ChunkedHead` of a model; None if `chunk_loss` hasn't added a chunked head."""
    forwards = (vars(module).get("forward") for module in model.modules())
    return next((forward for forward in forwards if isinstance(forward, ChunkedHead)), None)


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Restore the head's own `forward`, which computes all logits at once, within the scope."""
    chunked: Any = chunked_head(model)
    if chunked is not None:
        del chunked.head.forward
    try:
        yield
    finally:
        if chunked is not None:
            chunked.head.forward = chunked


class _Recipe(NamedTuple):
    """The computation of lazy logits: a head, then the recorded row-wise operations.

    `autocast` is the dtype of autocast in the call of the head, None if autocast was off; `dtype`
    and `device` are those of the resulting logits.
    """

    source: ChunkedHead
    steps: tuple[Callable[[Tensor], Tensor], ...]
    autocast: torch.dtype | None
    dtype: torch.dtype
    device: torch.device

    def autocasting(self, hidden: Tensor) -> torch.autocast:
        """Return the autocast context of the head's call, without a cache of cast weights."""
        kind, is_on = hidden.device.type, self.autocast is not None
        return torch.autocast(kind, dtype=self.autocast, enabled=is_on, cache_enabled=False)

    def compute(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., vocabulary] from hidden states [..., width]."""
        logits = self.source.compute(hidden)
        for step in self.steps:
            logits = step(logits)
        return logits


class LazyLogits(Tensor):
    """Logits [..., vocabulary], computed from `hidden` only when an operation needs their values.

    `computed` is None until the full logits are materialized.
    """

    hidden: Tensor
    recipe: _Recipe
    computed: Tensor | None

    @staticmethod
    def of(hidden: Tensor, recipe: _Recipe) -> LazyLogits:
        """Create the lazy logits of hidden states."""
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
        """Materialize the full logits; later calls return the same tensor."""
        if self.computed is None:
            is_recorded = bool(self.requires_grad)
            with torch.set_grad_enabled(is_recorded), self.recipe.autocasting(self.hidden):
                self.computed = self.recipe.compute(self.hidden)
        return self.computed

    # A function of lazy logits has one of three outcomes. An attribute is read from the wrapper's
    # metadata. A row-wise function returns lazy logits with one more step, and `cross_entropy` the
    # loss. Any other function, and every function after a first materialization, gets the
    # materialized logits (`__torch_dispatch__`).
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ATTRIBUTES:
            inherited: Any = super()  # not annotated in torch
            return inherited.__torch_function__(func, types, args, kwargs)
        logits = args[0] if args else None
        # Materialized logits may have been changed in place, so no further step is recorded.
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
        """Apply a function without the full logits; return None if impossible."""
        if func is cross_entropy:
            return _chunked_cross_entropy(self, *args, **kwargs)
        if func in _SHAPING and not kwargs:
            hidden = _reshape_hidden(self, func, args)
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
# Getters and methods that read a tensor's metadata only.
_ATTRIBUTES = {getattr(Tensor, name).__get__ for name in _PROPERTIES}
_ATTRIBUTES |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point}
# Row-wise operations, with the supported types of their further arguments.
_STEPS: dict[Any, tuple[type, ...]] = {
    Tensor.float: (),
    Tensor.to: (bool, str, torch.dtype, torch.device),
    **dict.fromkeys((Tensor.mul, Tensor.div, torch.mul, torch.div), (int, float)),
    **dict.fromkeys((Tensor.tanh, torch.tanh), ()),
}
_SHAPING = frozenset({Tensor.view, Tensor.reshape, Tensor.__getitem__, Tensor.contiguous})


# Each row of logits depends on the same row of hidden states only. So an index or a view that keeps
# all columns can be applied to the hidden states instead. For logits [batch, tokens, 32000]:
#
#   logits[:, :-1]               hidden[:, :-1]
#   logits[..., :-1, :]          hidden[..., :-1, :]        the last index keeps all columns
#   logits.view(-1, 32000)       hidden.reshape(-1, width)
#   logits[..., :100]            None                       the index selects some columns
#   logits[mask]                 None                       only integers and slices are supported
#
# That covers transformers' `ForCausalLMLoss`: float(), view(-1, vocab_size), cross_entropy.
def _reshape_hidden(logits: LazyLogits, func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """Apply an index or a view of the logits to the hidden states.

    Returns None if the index or view doesn't keep all columns, or isn't supported.
    """
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


def _chunked_cross_entropy(
    logits: LazyLogits,
    target: Any,
    *extra_args: Any,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **extra_kwargs: Any,
) -> Tensor | None:
    """Compute `torch.nn.functional.cross_entropy` in chunks of rows, from logits [rows, columns].

    Returns None if the arguments are unsupported: class weights or another extra argument, label
    smoothing, class probabilities as target, or logits of other dimensions.
    """
    is_plain = all(arg is None for arg in (*extra_args, *extra_kwargs.values()))
    if not is_plain or label_smoothing or reduction not in ("mean", "sum", "none"):
        return None
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.is_floating_point():
        return None
    # `_ChunkedLoss` returns the head's gradients, so the head's parameters are among its inputs.
    trained = [p for p in logits.recipe.source.head.parameters() if p.requires_grad]
    options = {"ignore_index": ignore_index, "reduction": reduction.replace("mean", "sum")}
    loss: Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        logits.recipe, options, target, logits.hidden, *trained
    )
    if reduction == "mean":
        loss = loss / (target != ignore_index).sum()
    return loss.to(logits.dtype)


# With hidden states H [tokens, width], a head W and chunks c of rows, the loss is a sum over c, so
# dL/dH[c] depends on chunk c alone and dL/dW is the sum of the chunks' gradients:
#
#   forward    for c: logits_c = head(H[c]); total += cross_entropy(logits_c)   (no graph is kept)
#   backward   for c: recompute logits_c with a graph; dH[c] = …; dW += …
#
# Only one chunk of logits and its gradient exist at a time: [rows, vocabulary] instead of
# [tokens, vocabulary]. For 8,192 tokens, a vocabulary of 151,552 and float32, the logits take
# 0.58 GiB in chunks of 1,024 rows instead of 4.6 GiB, and their gradient as much. The cost is a
# second matrix product with the head.
class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy, summed or of each row, in float32; its backward recomputes the chunks.

    Gradients computed in the forward pass would save the recomputation. But they would be held for
    every micro-batch in flight, and in float16 they need the loss scale, unknown at that time.
    """

    @staticmethod
    def forward(
        ctx: Any, recipe: _Recipe, options: Any, target: Tensor, hidden: Tensor, *heads: Tensor
    ) -> Tensor:
        ctx.recipe, ctx.options, is_summed = recipe, options, options["reduction"] == "sum"
        ctx.save_for_backward(target, hidden, *heads)
        sizes = () if is_summed else (len(hidden),)
        loss = torch.zeros(sizes, dtype=torch.float32, device=recipe.device)
        with recipe.autocasting(hidden):
            for rows in recipe.source.chunks(len(hidden)):
                part = loss if is_summed else loss[rows]
                part += _cross_entropy(recipe, hidden[rows], target[rows], options)
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        target, hidden, *trained = ctx.saved_tensors
        needs_hidden = ctx.needs_input_grad[3]
        hidden_grad = torch.empty_like(hidden) if needs_hidden else None
        head_grads = [torch.zeros_like(parameter) for parameter in trained]

        def add(rows: slice) -> None:
            # A function of its own, so that a chunk's tensors are freed before the next chunk.
            part = hidden[rows].detach().requires_grad_(needs_hidden)
            with torch.enable_grad(), ctx.recipe.autocasting(hidden):
                loss = _cross_entropy(ctx.recipe, part, target[rows], ctx.options)
            inputs = [part, *trained] if needs_hidden else trained
            gradient = gradients[0][rows] if gradients[0].dim() else gradients[0]
            grads = list(torch.autograd.grad(loss, inputs, gradient))
            if hidden_grad is not None:
                hidden_grad[rows] = grads.pop(0)
            for total, gradient in zip(head_grads, grads, strict=True):
                total += gradient

        for rows in ctx.recipe.source.chunks(len(hidden)):
            add(rows)
        return None, None, None, hidden_grad, *head_grads


def _cross_entropy(
    recipe: _Recipe, hidden: Tensor, target: Tensor, options: Mapping[str, Any]
) -> Tensor:
    """Compute the cross entropy of a chunk of hidden states [rows, width]."""
    return cross_entropy(recipe.compute(hidden).float(), target, **options)
