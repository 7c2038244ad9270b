"""The training loop of all embedded models: with a time budget, resumable, one CUDA graph per step.

With these small networks a step consists of many tiny kernels; launched one by one, they would leave the GPU mostly
idle. So the whole step (noise, forward, backward, clipping, AdamW, EMA) is captured once and replayed. Everything that
changes between steps (learning rate, EMA weight) is a tensor on the device.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

_STARTED = time.perf_counter()


@dataclass
class Budget:
    """How long to train. The learning rate follows `minutes` (or `steps`) over all runs of a training."""

    minutes: float = 1.0
    steps: int | None = None  # if given, this many steps whatever the time (tests)
    stop_s: float = math.inf  # this process ends at that age, its checkpoint saved; the next one resumes
    save_every_s: float = 60.0
    print_every_s: float = 10.0
    squeeze: float = 0.0  # shorten the schedule by up to this share if it then ends within this run
    graph: bool = True  # capture the step as a CUDA graph


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments that every training has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and models")
    parser.add_argument("--minutes", type=float, default=5.0, help="whole training, over all resumed runs")
    parser.add_argument("--steps", type=int, help="stop by steps instead of time")
    parser.add_argument(
        "--stop-s", type=float, default=math.inf, help="end this run after so many seconds, resumably"
    )
    parser.add_argument(
        "--squeeze",
        type=float,
        default=0.0,
        help="shorten the schedule by up to this share to end within this run",
    )
    parser.add_argument("--batch", type=int, help="images per step")
    parser.add_argument("--scenes", type=int, default=300_000, help="size of the training pool")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-graph", action="store_true", help="launch kernels one by one: slow, but safe")
    return parser


def budget_from(args: argparse.Namespace) -> Budget:
    return Budget(
        minutes=args.minutes,
        steps=args.steps,
        stop_s=args.stop_s,
        squeeze=args.squeeze,
        graph=not args.no_graph,
    )


class Loop:
    """Trains `modules` on `loss()`. Weights are fp32; `ema` holds their running mean.

    loss() returns the loss and a (k,) tensor of values to print under the names in `figures`. It must not synchronise
    with the device, and takes random numbers from torch's default generators.
    """

    def __init__(
        self,
        name: str,
        modules: Mapping[str, nn.Module],
        loss: Callable[[], tuple[Tensor, Tensor]],
        *,
        figures: tuple[str, ...],
        rate: float,
        budget: Budget,
        checkpoint: Path,
        seed: int = 0,
        warm_up: int = 200,
        ema: float = 0.999,
        decay: float = 0.01,
    ) -> None:
        self.name, self.loss, self.figures, self.budget = name, loss, figures, budget
        self.rate, self.warm_up, self.ema_decay = rate, warm_up, ema
        self.checkpoint, self.seed = checkpoint, seed
        self.parameters = {
            f"{part}.{key}": parameter
            for part, module in modules.items()
            for key, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self.values = list(self.parameters.values())
        self.device = self.values[0].device
        on_cuda = self.device.type == "cuda"
        self.rate_now = torch.tensor(rate, device=self.device)
        self.optimizer = torch.optim.AdamW(
            self.values,
            lr=self.rate_now,
            betas=(0.9, 0.99),
            weight_decay=decay,
            fused=on_cuda,
            capturable=on_cuda,
        )
        self.ema = [value.detach().clone() for value in self.values]
        self.ema_now = torch.zeros((), device=self.device)
        self.sums = torch.zeros(1 + len(figures), device=self.device)
        self.step, self.elapsed_s = 0, 0.0
        self.last: dict[str, float] = {}
        if checkpoint.exists():
            self._load()

    def run(self) -> dict[str, float]:
        """Train until the budget or this run's time is used up; return the last printed figures."""
        torch.manual_seed(self.seed + self.step)
        captured = self.device.type == "cuda" and self.budget.graph and not self.finished
        advance = self._capture() if captured else self._advance
        before, base_s = time.perf_counter(), self.elapsed_s
        self._squeeze(self.budget.stop_s - (before - _STARTED))
        printed, saved, steps_printed = before, before, self.step
        while not self.finished:
            self._set_rates()
            advance()
            self.step += 1
            if self.step % 16 and self.device.type == "cuda":
                continue  # let launches run ahead, but not without end
            self._wait()
            now = time.perf_counter()
            self.elapsed_s = base_s + now - before
            if now - printed > self.budget.print_every_s:
                self._print(self.step - steps_printed, now - printed)
                printed, steps_printed = now, self.step
            if now - saved > self.budget.save_every_s:
                self.save()
                saved = now
            if now - _STARTED > self.budget.stop_s:
                break
        self._wait()
        self._print(self.step - steps_printed, time.perf_counter() - printed)
        self.save()
        return self.last

    @property
    def finished(self) -> bool:
        """Whether the whole budget is used up."""
        return self._progress() >= 1

    def _progress(self) -> float:
        if self.budget.steps is not None:
            return self.step / self.budget.steps
        return self.elapsed_s / (60 * self.budget.minutes)

    def _squeeze(self, left_s: float) -> None:
        """Shorten the schedule to end within this run, so that the learning rate still decays fully."""
        wanted_s = 60 * self.budget.minutes - self.elapsed_s
        if (1 - self.budget.squeeze) * wanted_s <= left_s < wanted_s:
            self.budget.minutes = (self.elapsed_s + left_s) / 60

    def _set_rates(self) -> None:
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, self._progress())))
        ramp = min(1.0, (self.step + 1) / self.warm_up)
        self.rate_now.fill_(self.rate * ramp * max(cosine, 0.005))
        self.ema_now.fill_(min(self.ema_decay, (1 + self.step) / (10 + self.step)))

    def _advance(self) -> None:
        loss, figures = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.values, 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_mul_(self.ema, self.ema_now)
            torch._foreach_add_(self.ema, torch._foreach_mul(self.values, 1 - self.ema_now))
            self.sums += torch.cat([loss.detach()[None], figures.detach()]).float()

    def _capture(self) -> Callable[[], None]:
        """Capture one step as a CUDA graph. The three warm-up steps are normal training steps."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._set_rates()
                self._advance()
                self.step += 1
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        self.graph = graph  # the captured memory lives as long as this
        return graph.replay

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _print(self, steps: int, seconds: float) -> None:
        if not steps:
            return
        means = (self.sums / steps).tolist()
        self.sums.zero_()
        self.last = dict(zip(("loss", *self.figures), means, strict=True))
        text = "  ".join(f"{key} {value:.5f}" for key, value in self.last.items())
        print(
            f"{self.name}  step {self.step}  {self.elapsed_s:.0f} s  {text}  rate {self.rate_now.item():.2e}"
            f"  {steps / seconds:.1f} steps/s",
            flush=True,
        )
        if not math.isfinite(means[0]):
            raise FloatingPointError(f"{self.name}: the loss is {means[0]} at step {self.step}")

    def save(self) -> None:
        """Write the checkpoint atomically: 8 bytes per parameter (fp32 weight, two bf16 moments), and 4 for the EMA."""
        state: dict[str, Any] = {"step": self.step, "elapsed_s": self.elapsed_s, "weights": {}, "ema": {}}
        state["first"], state["second"] = {}, {}
        for (key, value), mean in zip(self.parameters.items(), self.ema, strict=True):
            state["weights"][key] = value.detach().cpu()
            state["ema"][key] = mean.cpu()
            if moments := self.optimizer.state.get(value):
                state["first"][key] = moments["exp_avg"].to("cpu", torch.bfloat16)
                state["second"][key] = moments["exp_avg_sq"].to("cpu", torch.bfloat16)
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unsaved = self.checkpoint.with_suffix(".part")
        torch.save(state, unsaved)
        os.replace(unsaved, self.checkpoint)
        facts = {
            "name": self.name,
            "steps": self.step,
            "seconds": round(self.elapsed_s, 1),
            "finished": self.finished,
            "planned_s": 60 * self.budget.minutes if self.budget.steps is None else None,
            **self.last,
        }
        self.checkpoint.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")

    @torch.no_grad()
    def _load(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        self.step, self.elapsed_s = state["step"], state["elapsed_s"]
        for (key, value), mean in zip(self.parameters.items(), self.ema, strict=True):
            value.copy_(state["weights"][key])
            mean.copy_(state["ema"][key])
            if key in state["second"]:
                second = state["second"][key].float()
                # A carried checkpoint leaves out the first moment: Adam rebuilds it in some twenty steps.
                first = state["first"][key].float() if key in state["first"] else torch.zeros_like(second)
                steps = torch.tensor(float(self.step))
                self.optimizer.state[value] = {
                    "step": steps.to(self.device) if self.device.type == "cuda" else steps,
                    "exp_avg": first,
                    "exp_avg_sq": second,
                }
        print(f"{self.name}  resumed at step {self.step}, {self.elapsed_s:.0f} s", flush=True)

    @torch.no_grad()
    def use_ema(self) -> None:
        """Replace the modules' weights with their running mean. Training ends here."""
        for value, mean in zip(self.values, self.ema, strict=True):
            value.copy_(mean)


def avoid_broken_attention() -> None:
    """Disable cuDNN's attention in training.

    Its backward gives NaN for some lengths with a mask (https://github.com/pytorch/pytorch/issues/196678). At these
    sizes it would not be faster.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def mixed_precision(device: str) -> torch.autocast:
    """Compute matmuls and convolutions in bf16 on a GPU. A CPU without instructions for it takes ten times as long."""
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def compiled(function: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """Compile a function on a GPU, unless disabled. On a CPU compiling costs more than it saves."""
    if args.no_compile or args.device == "cpu":
        return function
    return torch.compile(function, dynamic=False)


def wait_for(path: Path, name: str, stop_s: float = math.inf) -> None:
    """Wait until another training, started at the same time, has written what this one needs."""
    announced = False
    while not path.exists():
        if time.perf_counter() - _STARTED > stop_s:
            raise SystemExit(f"{name}: {path} did not come in {stop_s:.0f} s")
        if not announced:
            print(f"{name}  waits for {path}", flush=True)
            announced = True
        time.sleep(1)


def destination(out: Path, folder: str, finished: bool) -> Path:
    """Return where a stage writes its model. An unfinished model gets another name, since other stages wait for it."""
    return out / (folder if finished else f"{folder}.so-far")
