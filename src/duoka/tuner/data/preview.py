"""Preview of the first samples, for review before training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby

from rich.console import Group, RenderableType
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from duoka.base.text import printable
from duoka.base.units import format_count

from .dataset import Dataset

_MOST_TOKENS = 200
_LONG_RUN = 16  # number of equal tokens in a row
_MOST_BAD_ROWS = 5
# Trained text stands between these marks as well: colour is lost in a file, and not seen by all.
_MARKS = ("⟦", "⟧")


def render_preview(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, number: int = 3
) -> RenderableType:
    """Render the data's size and the first `number` samples (or pairs) as the model sees them."""
    number = min(number * dataset.group_size, len(dataset))
    samples = (_sample(dataset, tokenizer, at) for at in range(number))
    return Group(*_summary(dataset), *samples)


def _summary(dataset: Dataset) -> Iterator[Text]:
    """Yield the numbers of samples and tokens, and the first skipped rows."""
    trained = int(dataset.trained_tokens.sum())
    share = trained / len(dataset.ids)
    noun = "sample" if dataset.group_size == 1 else "pair"
    number = format_count(len(dataset) // dataset.group_size, noun)
    yield Text(
        f"{number}, {len(dataset.ids):,} tokens, of which "
        f"{trained:,} ({share:.0%}) are trained; the longest has {int(dataset.lengths.max()):,}"
    )
    if dataset.weights:
        yield Text(f"{len(dataset.draw(0, None)):,} {noun}s per epoch by the weights of the files")
    bad = dataset.bad_rows
    kinds = Counter(row.kind for row in bad)
    counts = [f"{number:,} {kind}" for kind, number in kinds.most_common()]
    notes = [f"{format_count(len(bad), 'row')} skipped ({', '.join(counts)})"] if bad else []
    if chats := len(dataset.num_dropped):
        dropped = format_count(sum(dataset.num_dropped), "message")
        notes.append(f"{format_count(chats, 'conversation')} truncated ({dropped} dropped)")
    if notes:
        yield Text("; ".join(notes))
        yield from (Text(f"  {row}") for row in bad[:_MOST_BAD_ROWS])
        if len(bad) > _MOST_BAD_ROWS:
            yield Text(f"  … and {len(bad) - _MOST_BAD_ROWS} more")


def _sample(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, at: int) -> Text:
    """Format the sample at an index as text, with marks around the trained tokens.

    In samples with images a long run of a token is shown as one token.
    """
    ids, is_trained = dataset.tokens(at)
    heading = f"{dataset.place(at)}  {len(ids)} tokens, {int(is_trained.sum())} trained"
    if dataset.group_size > 1:
        heading += f", {('chosen', 'rejected')[at % dataset.group_size]}"
    pairs = list(zip(ids.tolist(), is_trained.tolist(), strict=True))
    if dataset.images and dataset.images[at]:
        heading += f", {format_count(len(dataset.images[at]), 'image')}"
        runs = [list(run) for _, run in groupby(pairs)]
        pairs = [pair for run in runs for pair in (run if len(run) < _LONG_RUN else run[:1])]
    text = Text(f"\n{heading}\n", style="bold")
    for trained, run in groupby(pairs[:_MOST_TOKENS], lambda pair: pair[1]):
        piece = printable(str(tokenizer.decode([number for number, _ in run])))
        opening, closing = _MARKS
        text.append(
            f"{opening}{piece}{closing}" if trained else piece, "green" if trained else "dim"
        )
    if len(pairs) > _MOST_TOKENS:
        text.append(" …", "dim")
    return text
