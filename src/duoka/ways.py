"""Ways out: what would fit where nothing does, each found by the planner that would plan it.

The ways that cost least quality come first: fewer tokens, smaller pieces of the prompt, a smaller
batch, a cache and weights of fewer bits, weights in the host's memory, another GPU. Every way
carries the arguments of the command line that ask for it.

Some ways are planned with another profile of the model (its cache or weights in 8 bit), which
somebody else has to give: this room traces nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

from . import given
from .errors import DuokaError, InfeasibleError, WayOut
from .host import fleet_for
from .planner import Found, Question, largest_that_works, shortened, with_chunks
from .plans import Plan
from .profile import Profile
from .units import format_bytes
from .upgrades import upgrades
from .workload import Training, Workload

ProfileFor = Callable[[Workload], Profile | None]
"""The profile for a workload; None where it isn't known without tracing the model."""

_MANY_CHUNKS = 32
_ACCURACY = "some accuracy: `duoka bench --quality FILE` measures it on your text"


def answer(
    profile: Profile,
    question: Question,
    *,
    source: str = "",
    profile_for: ProfileFor | None = None,
    only_all: bool = False,
) -> Plan:
    """The plan for a question, or what would fit instead.

    Parameters
    ----------
    profile : Profile
        For the question's workload.
    question : Question
    source : str
        The checkpoint's directory, kept in the plan.
    profile_for : callable, optional
        The profile for another workload. It raises an error for one that the model can't do. By
        default there is none but the one given.
    only_all : bool
        Look for no ways at all where a profile for some of them is missing.

    Raises
    ------
    PlacementError, UsageError
        As `given.answer`.
    InfeasibleError
        If nothing fits: with the shortfall and the ways out.
    """
    try:
        return given.answer(profile, question, source=source)
    except InfeasibleError as error:
        search = WaysOut(profile, question, profile_for)
        ways = () if only_all and search.lacks_profiles() else tuple(search.found())
        raise InfeasibleError(
            str(error),
            hint=error.hint,
            shortfall_bytes=error.shortfall_bytes,
            ways_out=ways,
            untraced=search.untraced,
        ) from None


class WaysOut:
    """The search for ways out of one question that has no answer.

    Parameters
    ----------
    profile, question, profile_for
        As for `answer`.

    Attributes
    ----------
    untraced : bool
        Whether a profile was missing.
    """

    def __init__(
        self, profile: Profile, question: Question, profile_for: ProfileFor | None = None
    ) -> None:
        self.untraced = False
        self._profile = profile
        self._question = question
        self._workload = question.workload
        self._profile_for = profile_for or self._own

    def found(self) -> Iterator[WayOut]:
        """The ways, cheapest for quality first."""
        if self._workload.training is None:
            context = list(self._context())
            yield from context
            yield from self._chunk()
            yield from self._batch("a batch")
            yield from self._fewer_bits(shorten=not context)
            yield from self._offload()
        else:
            yield from self._checkpointing()
            yield from self._lora()
            yield from self._batch("a micro-batch")
            yield from self._context()
        if self._question.device_map is not None:
            yield from self._without_map()
        else:
            yield from self._gpus()

    def lacks_profiles(self) -> bool:
        """Whether a profile is missing that some way out would be planned with."""
        for workload in self._others():
            self._profile_of(workload)
        return self.untraced

    def _others(self) -> Iterator[Workload]:
        """The workloads of ways out that are under other conditions."""
        workload, training = self._workload, self._workload.training
        if training is None:
            if workload.cache != "int8":
                yield replace(workload, cache="int8")
            for scheme in _smaller(workload):
                yield replace(workload, quantize=scheme)
            return
        yield self._trained(replace(training, gradient_checkpointing=True))
        if training.method == "full":
            yield from map(self._trained, _with_adapters(training))

    # ── fewer tokens, smaller pieces ──

    def _context(self) -> Iterator[WayOut]:
        if self._question.largest is not None:
            return  # the shortest was tried
        plan = self._longest(self._profile, self._workload)
        if plan is not None:
            yield _way("context", _context_text(plan), plan, options=_context_options(plan))

    def _longest(self, profile: Profile, workload: Workload) -> Plan | None:
        """The plan for as long a context as fits."""

        def of(tokens: int) -> Question:
            return replace(self._question, workload=_with_tokens(workload, tokens))

        return self._largest(profile, of, 2, workload.context_tokens - 1)

    def _chunk(self) -> Iterator[WayOut]:
        asked = self._workload.prefill_chunk_tokens
        if asked == "auto":
            return
        plan = self._plan_for(replace(self._workload, prefill_chunk_tokens="auto"))
        if plan is None:
            return
        chunk = plan.workload.prefill_chunk_tokens
        if not isinstance(chunk, int) or (isinstance(asked, int) and chunk >= asked):
            return
        text = f"the prompt in pieces of {chunk} tokens"
        loses = "nothing but a little time before the first token"
        yield _way("chunk", text, plan, options=("--prefill-chunk", str(chunk)), loses=loses)

    def _batch(self, what: str) -> Iterator[WayOut]:
        if self._question.largest is not None:
            return  # the smallest was tried

        def of(number: int) -> Question:
            return replace(self._question, workload=replace(self._workload, batch=number))

        plan = self._largest(self._profile, of, 1, self._workload.batch - 1)
        if plan is not None:
            size = plan.workload.batch
            yield _way("batch", f"{what} of {size}", plan, options=("--batch", str(size)))

    # ── fewer bits ──

    def _fewer_bits(self, *, shorten: bool) -> Iterator[WayOut]:
        workload = self._workload
        if workload.cache != "int8":
            plan = self._plan_for(replace(workload, cache="int8"))
            if plan is not None:
                text, options = "the KV cache in 8 bit", ("--cache", "int8")
                yield _way("cache", text, plan, options=options, loses=_ACCURACY)
        fits = False
        for scheme in _smaller(workload):
            plan = self._plan_for(replace(workload, quantize=scheme))
            if plan is not None:
                fits = True
                yield self._quantized(scheme, plan)
        if shorten and not fits:
            for scheme in _smaller(workload):
                yield from self._quantized_and_shorter(replace(workload, quantize=scheme))

    def _quantized(self, scheme: str, plan: Plan) -> WayOut:
        weights = sum(each.weight_bytes for each in plan.forecast.devices)
        text = (
            f"weights in {scheme.removeprefix('int')} bit ({scheme}): {format_bytes(weights)} "
            f"instead of {format_bytes(self._profile.weight_bytes)}"
        )
        return _way(scheme, text, plan, options=("--quantize", scheme), loses=_ACCURACY)

    def _quantized_and_shorter(self, workload: Workload) -> Iterator[WayOut]:
        profile = self._profile_of(workload)
        plan = None if profile is None else self._longest(profile, workload)
        if plan is not None:
            way = self._quantized(workload.quantize, plan)
            text = f"{way.text}, and {_context_text(plan)}"
            yield replace(way, text=text, options=(*way.options, *_context_options(plan)))

    # ── what training may do without ──

    def _checkpointing(self) -> Iterator[WayOut]:
        training = self._workload.training
        assert training is not None
        if training.gradient_checkpointing:
            return
        plan = self._plan_for(self._trained(replace(training, gradient_checkpointing=True)))
        if plan is not None:
            yield _way(
                "checkpointing",
                "activations that are computed again in the backward pass",
                plan,
                options=("--gradient-checkpointing",),
                loses="about a third of the speed",
            )

    def _lora(self) -> Iterator[WayOut]:
        training = self._workload.training
        assert training is not None
        if training.method != "full":
            return
        for lora in _with_adapters(training):
            plan = self._plan_for(self._trained(lora))
            if plan is not None:
                more = lora.gradient_checkpointing and not training.gradient_checkpointing
                yield _way(
                    "lora",
                    "low-rank adapters (LoRA) instead of all weights"
                    + (", and activations that are computed again" if more else ""),
                    plan,
                    options=("--train", "lora", *(["--gradient-checkpointing"] if more else [])),
                    without=("--master-weights",) if training.master_weights else (),
                    loses="what adapters can't learn",
                )
                return

    def _trained(self, training: Training) -> Workload:
        return replace(self._workload, training=training)

    # ── other memory ──

    def _offload(self) -> Iterator[WayOut]:
        question = self._question
        if question.constraints.offload or question.device_map is not None:
            return
        constraints = replace(question.constraints, offload=True)
        try:
            fleet = fleet_for(question.fleet, None, offload=True)
        except DuokaError:
            return  # how much memory the host has isn't known
        plan = self._plan(self._profile, replace(question, fleet=fleet, constraints=constraints))
        if plan is None:
            return
        forecast = plan.forecast
        seconds = forecast.copy_seconds
        took = f", about {seconds:.2g} s" if seconds else ", which takes as long as the link needs"
        yield _way(
            "offload",
            f"{format_bytes(forecast.host_bytes)} of weights in the CPU's memory, which go over "
            f"PCIe for each token{took}",
            plan,
            options=("--offload",),
            loses="speed",
        )

    def _gpus(self) -> Iterator[WayOut]:
        for upgrade in upgrades(
            self._question,
            lambda question: self._possible(self._profile, question),
            lambda question: self._plan(self._profile, question),
        ):
            yield _way("gpu", upgrade.text, upgrade.plan, options=("--gpus", upgrade.gpus))

    def _without_map(self) -> Iterator[WayOut]:
        question = replace(self._question, device_map=None)
        plan = self._plan(self._profile, question)
        if plan is not None:
            sizes = ", ".join(
                f"{each.device} {format_bytes(each.allocated_bytes)} of "
                f"{format_bytes(each.budget_bytes)}"
                for each in plan.forecast.devices
            )
            text = f"duoka's own plan instead of the map: {sizes}"
            yield _way("map", text, plan, without=("--device-map",))
            return
        for way in WaysOut(self._profile, question, self._profile_for).found():
            text = f"{way.text}, with duoka's own plan instead of the map"
            yield replace(way, text=text, without=(*way.without, "--device-map"))

    # ── asking the planner ──

    def _largest(
        self, profile: Profile, build: Callable[[int], Question], low: int, high: int
    ) -> Plan | None:
        return largest_that_works(
            lambda number: self._possible(profile, build(number)),
            lambda number: self._probed(profile, build(number)),
            low,
            high,
        )

    def _probed(self, profile: Profile, question: Question) -> Plan | None:
        """The plan; of a long prompt quickly None where its smallest chunk won't do.

        Now and then a larger chunk would, whose caches are copied less often.
        """
        *_, least = with_chunks(question.workload)
        if least != question.workload and len(least.chunks()) > _MANY_CHUNKS:
            smallest = replace(question, workload=least)
            if self._plan(profile, smallest) is None:
                return None
        return self._plan(profile, question)

    def _plan_for(self, workload: Workload) -> Plan | None:
        """The plan for another workload; its profile may be another one."""
        profile = self._profile_of(workload)
        question = replace(self._question, workload=workload)
        if profile is None or not self._possible(profile, question):
            return None
        return self._plan(profile, question)

    def _profile_of(self, workload: Workload) -> Profile | None:
        try:
            profile = self._profile_for(workload)
        except DuokaError:
            return None  # the model can't do that
        self.untraced = self.untraced or profile is None
        return profile

    def _own(self, workload: Workload) -> Profile | None:
        same = workload.conditions == self._profile.conditions
        return self._profile if same else None

    def _possible(self, profile: Profile, question: Question) -> bool:
        return bool(self._tried(lambda: given.possible(profile, question) or None))

    def _plan(self, profile: Profile, question: Question) -> Plan | None:
        return self._tried(lambda: given.attempt(profile, question))

    def _tried(self, ask: Callable[[], Found | None]) -> Found | None:
        try:
            return ask()
        except DuokaError:
            return None  # what can't be asked is no way out


def _smaller(workload: Workload) -> tuple[Literal["int8", "int4"], ...]:
    """What weights may still become, the most bits first."""
    if workload.quantize == "none":
        return ("int8", "int4")
    return ("int4",) if workload.quantize == "int8" else ()


def _with_adapters(training: Training) -> list[Training]:
    """The same training of adapters alone, with no more computed twice than need be."""
    lora = replace(training, method="lora", master_weights=False)
    both = (lora, replace(lora, gradient_checkpointing=True))
    return list(dict.fromkeys(both))


def _with_tokens(workload: Workload, tokens: int) -> Workload:
    if workload.training is not None:
        return replace(workload, prompt_tokens=tokens)
    return shortened(workload, tokens)


def _context_text(plan: Plan) -> str:
    workload = plan.workload
    if workload.training is not None:
        return f"sequences of {workload.prompt_tokens} tokens"
    return f"a context of {workload.context_tokens} tokens, {workload.new_tokens} of them new"


def _context_options(plan: Plan) -> tuple[str, ...]:
    workload = plan.workload
    new = () if workload.training is not None else ("--new-tokens", str(workload.new_tokens))
    return ("--context", str(workload.context_tokens), *new)


def _way(
    kind: str,
    text: str,
    plan: Plan,
    *,
    options: tuple[str, ...] = (),
    without: tuple[str, ...] = (),
    loses: str = "",
) -> WayOut:
    chunk = plan.workload.prefill_chunk_tokens
    return WayOut(
        kind=kind,
        text=text,
        loses=loses,
        options=options,
        without=without,
        context_tokens=plan.workload.context_tokens,
        batch=plan.workload.batch,
        prefill_chunk_tokens=chunk if isinstance(chunk, int) else None,
        num_gpus=len(plan.devices),
        free_bytes=min(each.free_bytes for each in plan.forecast.devices),
    )
