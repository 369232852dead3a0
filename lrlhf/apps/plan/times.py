"""How long an iteration takes on GPUs, in closed form: work over an assumed share of the peak.

Each phase is a roofline: it takes the longer of its arithmetic and of its traffic with memory. No
figure was ever compared with a GPU, and much is left out (`_NOTES`): a prediction stands for all
between a `RANGE`-th of it and `RANGE` times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from lrlhf.apps.plan.memory import kl_penalty, reference_spec, reward_models, teacher_spec
from lrlhf.cli.config_entries import is_a, options_of, spec_of
from lrlhf.models import CausalLM, ValueModel, ValueNetwork, new_value_head, packs, plain_model
from lrlhf.models.flops import PEAK_FLOPS, ModelSize, size_of
from lrlhf.models.loading.meta import skeleton
from lrlhf.modules.policy.iteration import BatchPlan, plain_text
from lrlhf.rollout import TransformersEngine
from lrlhf.rollout.vllm import VLLMServerEngine


class GPU(NamedTuple):
    """Dense bfloat16 FLOP/s, bytes of memory, and bytes/s of its memory and to other nodes."""

    flops: float
    memory: float
    bandwidth: float
    link: float


GPUS = {
    "a100": GPU(PEAK_FLOPS["a100"], 80e9, 2.039e12, 25e9),
    "h100": GPU(PEAK_FLOPS["h100"], 80e9, 3.35e12, 50e9),
    "h200": GPU(PEAK_FLOPS["h200"], 141e9, 4.8e12, 50e9),
    "b200": GPU(PEAK_FLOPS["b200"], 180e9, 7.7e12, 50e9),
    "l40s": GPU(PEAK_FLOPS["l40s"], 48e9, 0.864e12, 25e9),
}
"""A100 80GB SXM, H100 SXM, H200 SXM, B200 SXM with 180 GB, L40S. Each GPU has a network card:
ConnectX-7 of 400 Gbit/s as in DGX H100, ConnectX-6 of 200 Gbit/s as in DGX A100.

Reference:
    NVIDIA's figures as listed by https://glennklockwood.com/garden/processors/A100, …/h100 and
    …/B200, https://acecloud.ai/blog/nvidia-b200-vs-h200-h100-a100 (H200; memory of B200) and
    https://www.mullet.se/product.html?product_id=355414 (L40S); B200's memory bandwidth as the
    driver reports it: https://github.com/pytorch/ao/pull/4002
"""

RANGE = 2
"""Factor, either way, within which an iteration is expected; the shares below alone leave as much
open: training may reach 20 to 60 % of the peak, by the length of texts and micro-batches."""

_TRAINING, _GENERATION, _MEMORY, _LINK = 0.4, 0.5, 0.8, 0.7
"""Assumed shares of the peak: FLOP/s of trainers and engines, bytes/s of memory and links."""
_CACHE = 0.5
"""Assumed share of an engine's memory that has room for keys and values."""
_STEP_S, _OWN_STEP_S = 2e-3, 2e-2
"""Assumed seconds of a decoding step beside the roofline: of vLLM's scheduler and sampler, and of
`TransformersEngine`, which launches its kernels one by one."""
_OPTIMIZER_BYTES = 28
"""AdamW reads and writes weight, gradient and two moments of 4 bytes; it writes no gradient."""
_PROMPT_TOKENS = 512

_NOTES = f"""\
A closed form that was never compared with a GPU: it may be wrong by a factor of
{RANGE} either way. Assumed: {_TRAINING:.0%} of the peak FLOP/s in training, {_GENERATION:.0%} in
generation, {_MEMORY:.0%} of the memory bandwidth, {_LINK:.0%} of a link. Left out: collectives
of fsdp2 and DeepSpeed, rewards that no model gives, tools, media, checkpoints."""


class Texts(NamedTuple):
    """Prompts of all processes, responses to each, and tokens of a prompt and of responses."""

    prompts: int
    copies: int
    prompt: int
    response: float
    longest: int

    def forward_flops(self, model: ModelSize, *, shares_prompts: bool) -> float:
        """Return the FLOP of a pass over all texts, prompts once if responses share them."""
        responses = self.prompts * self.copies
        prompts = self.prompts if shares_prompts else responses
        tokens = prompts * self.prompt + responses * self.response
        length = self.prompt + self.response
        pairs = prompts * self.prompt**2 + responses * (length**2 - self.prompt**2)
        return model.forward_flops(tokens, pairs)


class Engine(NamedTuple):
    """Replicas that share the prompts; each has GPUs, and runs so many responses at a time."""

    replicas: int
    gpus: int = 1
    sequences: int = 256
    own: bool = False


class PhaseTime(NamedTuple):
    """A phase: its FLOP and bytes of all GPUs together, its seconds, and what takes them."""

    name: str
    flops: float
    moved: float
    seconds: float
    limit: str


def roofline(name: str, gpu: GPU, gpus: float, flops: float, moved: float = 0.0) -> PhaseTime:
    """Return a trainer's phase, whose work so many GPUs share equally."""
    computing = flops / (gpus * _TRAINING * gpu.flops)
    moving = moved / (gpus * _MEMORY * gpu.bandwidth)
    limit = "FLOP/s" if computing >= moving else "memory"
    return PhaseTime(name, flops, moved, max(computing, moving), limit)


def generation(model: ModelSize, texts: Texts, engine: Engine, gpu: GPU) -> list[PhaseTime]:
    """Return the phases that compute prompts, once for all their responses, and responses.

    The replica with the most prompts counts. Each decoding step reads all weights, and the keys and
    values of the responses that run.
    """
    groups = math.ceil(texts.prompts / engine.replicas)
    rows, busy = groups * texts.copies, texts.prompts / groups
    peak = engine.gpus * _GENERATION * gpu.flops
    cache_bytes = 4 * model.key_width  # bytes of the keys and values of a token
    each = cache_bytes * (texts.prompt / texts.copies + texts.longest)
    room = int(_CACHE * engine.gpus * gpu.memory / max(1, each))
    at_once = max(1, min(rows, engine.sequences, room))
    if engine.own:  # a batch runs until its longest response ends
        steps: float = math.ceil(rows / at_once) * texts.longest
        written, step_seconds = float(rows * texts.longest), _OWN_STEP_S
    else:  # a response begins when one has ended, and the longest may end alone
        steps = rows * texts.response / at_once + texts.longest - texts.response
        written, step_seconds = rows * texts.response, _STEP_S
    context = written * (texts.prompt + written / rows / 2)
    flops = 2 * model.multiplied * written + 4 * model.query_width * context
    moved = 2 * model.number * steps + cache_bytes * context
    reading = moved / (engine.gpus * _MEMORY * gpu.bandwidth)
    parts = {"FLOP/s": flops / peak, "memory": reading, "launch": step_seconds * steps}
    seconds = max(parts["FLOP/s"], reading) + parts["launch"]
    prompts = texts._replace(prompts=groups, copies=0).forward_flops(model, shares_prompts=True)
    limit = max(parts, key=lambda part: parts[part])
    return [
        PhaseTime("generate: prompts", prompts * busy, 0.0, prompts / peak, "FLOP/s"),
        PhaseTime("generate: responses", flops * busy, moved * busy, seconds, limit),
    ]


def time_report(sections: Mapping[str, Any], plan: BatchPlan, gpu: GPU) -> str:
    """Say how long an iteration takes, or in one line why that is unknown.

    Raises:
        ValueError: ``response_tokens`` of the config's ``sections`` is more than a response has.
    """
    options = options_of(sections["model"])
    longest = int(options_of(options["sampling"])["max_new_tokens"])
    response = sections["response_tokens"] or max(1, longest / 2)
    if response > longest:
        raise ValueError(
            f"--response-tokens is {response}, above model.sampling.max_new_tokens ({longest})"
        )
    prompt = int(options_of(sections["data"]).get("max_prompt_tokens") or _PROMPT_TOKENS)
    texts = Texts(plan.prompts, plan.responses_sampled // plan.prompts, prompt, response, longest)
    notes = list[str]()
    try:
        phases = list(_phases(sections, plan, texts, gpu, notes))
    except (ValueError, RuntimeError, NotImplementedError) as error:
        # a source that is not there, or a model whose shapes depend on its numbers
        return f"no table of times: {' '.join(str(error).split())}"
    generate = sum(phase.seconds for phase in phases[:2])
    others = sum(phase.seconds for phase in phases[2:])
    ahead = bool(options.get("max_staleness"))  # generation goes on beside training
    seconds = max(generate, others) if ahead else generate + others
    name = "iteration, max_staleness above 0" if ahead else "iteration"
    phases.append(PhaseTime(name, 0.0, 0.0, seconds, ""))
    table = Table(box=box.MARKDOWN)
    table.add_column(f"one iteration, {plan.world_size} × {sections['gpu']}", no_wrap=True)
    for heading in ("PFLOP", "TB", "limit", "seconds", "range"):
        table.add_column(heading, justify="left" if heading == "limit" else "right", no_wrap=True)
    for name, flops, moved, seconds, limit in phases:
        sizes = (flops / 1e15, moved / 1e12, seconds, seconds / RANGE, seconds * RANGE)
        rounded = [float(f"{size:.{digits}g}") for size, digits in zip(sizes, "33322", strict=True)]
        *work, shown, low, high = (f"{size:,g}" if size else "" for size in rounded)
        table.add_row(Text(name), *work, limit, shown, f"{low} – {high}")
    lengths = f"Tokens: {prompt} of a prompt, {response:g} of a response, {longest} of the longest."
    return "\n\n".join([plain_text(table), "\n".join([_NOTES, lengths, *notes])])


def _phases(
    sections: Mapping[str, Any], plan: BatchPlan, texts: Texts, gpu: GPU, notes: list[str]
) -> Iterator[PhaseTime]:
    """Go through an iteration, in its order."""
    options, gpus = options_of(sections["model"]), plan.world_size
    spec = spec_of(options["policy"], CausalLM)
    model = skeleton(spec, on_gpu=True)
    policy, shares = size_of(model, plain_model(model)), packs(plain_model(model))
    critic, entry = None, options_of(options.get("critic"))
    if entry.get("model") is not None:  # a head on the policy is not worth counting
        body = skeleton(spec_of(entry["model"], ValueModel), body=True, on_gpu=True)
        network = ValueNetwork(body, new_value_head(body, entry.get("head", "linear")))
        critic, shares = size_of(network, plain_model(body)), shares and packs(plain_model(body))
    engine = _engine(options.get("engine"), gpus)
    yield from generation(policy, texts, engine, gpu)
    if not engine.own:
        size = 2.0 * policy.number
        yield PhaseTime("weight sync", 0.0, size, size / (_LINK * gpu.link), "link")
    for name, scorer, _ in reward_models(options, notes.append):
        flops = texts.forward_flops(size_of(scorer, plain_model(scorer)), shares_prompts=False)
        yield roofline(f"score responses: {name}", gpu, gpus, flops)
    trained = texts._replace(prompts=plan.kept_prompts * gpus, copies=plan.num_generations)
    passes = [*_passes(options, spec, policy, plan), *([("values", critic)] if critic else [])]
    for name, passed in passes:
        yield roofline(name, gpu, gpus, trained.forward_flops(passed, shares_prompts=shares))
    for name, updated in (("policy", policy), ("critic", critic)):
        if updated is not None:
            factor = 1 + updated.backward_passes + updated.recomputes
            flops = factor * trained.forward_flops(updated, shares_prompts=shares)
            # optimizer states that all GPUs share, as with fsdp2
            moved = _OPTIMIZER_BYTES * updated.trained * plan.steps_per_iteration
            yield roofline(f"update {name}", gpu, gpus, flops * plan.num_iterations, moved)


def _passes(
    options: Mapping[str, Any], spec: CausalLM, policy: ModelSize, plan: BatchPlan
) -> Iterator[tuple[str, ModelSize]]:
    """Go through the passes of a policy's texts without gradients."""
    penalty, reference = kl_penalty(options), reference_spec(options, spec)
    if plan.steps_per_iteration > 1 or penalty == "reward":
        yield "log-probabilities", policy
    if penalty is not None and reference is None:  # the policy without its adapters
        yield "reference", policy
    teacher = options_of(options.get("teacher"))
    if teacher.get("context") and not teacher.get("server") and not teacher_spec(options, spec):
        yield "teacher", policy  # itself, or without its adapters
    for name, frozen in (("reference", reference), ("teacher", teacher_spec(options, spec))):
        if frozen is not None:
            model = skeleton(frozen, trainable=False)
            yield name, size_of(model, plain_model(model))


def _engine(entry: Any, gpus: int) -> Engine:
    """Read the engine of a run on so many GPUs."""
    options = options_of(entry)
    if entry is None or is_a(entry, TransformersEngine):
        limit = options.get("max_batch_size")
        return Engine(gpus, sequences=limit if isinstance(limit, int) else 2**31, own=True)
    split, sequences = options.get("tensor_parallel_size", 1), options.get("max_num_seqs") or 256
    if is_a(entry, VLLMServerEngine):
        urls = options.get("url") or ()
        servers = 1 if isinstance(urls, str) else len(urls) or options.get("replicas", 1)
        return Engine(servers, split, sequences)
    return Engine(max(1, gpus // split), split, sequences)
