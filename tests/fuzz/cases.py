"""Random malformed and malicious inputs: models, scorers, single files, prompts, pictures, recipes, options.

A case is a seed: the same seed makes the same files and the same command line.
"""

import json
import os
import pickle
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from PIL import Image

from tests.fuzz.runner import MARKER, OUTSIDE
from vivace.cli import app
from vivace.cli.commands import COMMANDS
from vivace.models.find import WEIGHTS

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 10**6, 10**9, 2**31, 2**63, 10**18, 10**30, 10**39, -(10**20), 0.5, -0.0, 1e30, 1e308,
    float("inf"), float("-inf"), float("nan"),
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, "", "0", "12", "x", ESCAPE, "../" * 4 + "etc/passwd", "/dev/zero", "a" * 5000, "=1+1", "\u202e",
    [], {}, [[]], [0], [None], [1, 2], ["x", 1], {"a": 1}, [[1, [2]], 3], "😀", "\ud800", "{{7*7}}", "torch.float16",
    "os.system",
)  # fmt: skip
SIZES = (
    "layers_per_block", "block_out_channels", "norm_num_groups", "attention_head_dim", "num_attention_heads",
    "num_hidden_layers", "max_position_embeddings", "vocab_size", "num_train_timesteps", "model_max_length",
    "in_channels", "out_channels", "latent_channels", "cross_attention_dim", "hidden_size", "intermediate_size",
    "sample_size", "transformer_layers_per_block", "num_class_embeds", "steps_offset", "patch_size", "image_size",
    "scaling_factor", "downsample_padding", "time_embedding_dim", "projection_dim", "eos_token_id", "beta_end",
)  # fmt: skip


class _Evil:
    """Unpickled, it writes the marker."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.marker, "a pickle"))


def make(seed: int, folder: Path) -> list[str]:
    """Write the files of a case into an empty folder and return the arguments of its command."""
    chance = random.Random(f"vivace {seed}")
    (folder / OUTSIDE).mkdir()
    kinds: tuple[tuple[Callable[[random.Random, Path], list[str]], int], ...] = (
        (_model, 40),
        (_scorer, 12),
        (_file, 10),
        (_prompts, 8),
        (_pictures, 10),
        (_recipe, 8),
        (_options, 12),
    )
    (kind,) = chance.choices([choice for choice, _ in kinds], [weight for _, weight in kinds])
    return kind(chance, folder)


def _model(chance: random.Random, folder: Path) -> list[str]:
    name = chance.choice(["model", "model", "model", f"m{ESCAPE}", "m\u202eodel", "a,b=c"])
    model = folder / name
    _copy(WEIGHTS / "tiny-sd", model)
    for _ in range(chance.choice((1, 1, 2, 3))):
        chance.choice(
            (_change_json, _change_json, _change_json, _change_weights, _replace_file, _plant, _index)
        )(chance, folder, model)
    steps = ["--num-inference-steps", "2", "--threads", "1"]
    return chance.choice(
        (
            ["plan", name],
            ["plan", name, "--card", "4"],
            ["generate", "a red circle", "--model", name, *steps],
            ["generate", "a red circle", "--model", name, *steps],
            ["export", "--model", name, *steps, "-o", "out.py"],
        )
    )


def _scorer(chance: random.Random, folder: Path) -> list[str]:
    _copy(WEIGHTS / "tiny-clip", folder / "clip")
    for _ in range(chance.choice((1, 1, 2))):
        chance.choice((_change_json, _change_json, _change_weights, _replace_file, _plant))(
            chance, folder, folder / "clip"
        )
    _two_folders(folder)
    (folder / "prompts.txt").write_text("a red circle\na blue square\n")
    return ["quality", "a", "b", "--scorer", "clip", "--prompts", "prompts.txt"]


def _file(chance: random.Random, folder: Path) -> list[str]:
    name = chance.choice(("x.safetensors", "x.gguf", "x.ckpt", "x.bin", "x"))
    path = folder / name
    kind = chance.randrange(4)
    if kind == 0:
        path.write_bytes(_garbage(chance))
    elif kind == 1:
        path.write_bytes(pickle.dumps(_Evil(folder / MARKER)))
    elif kind == 2:
        names = ["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.x", "cond_stage_model.y"]
        path.write_bytes(_safetensors(chance, {key: [4, 4, 3, 3] for key in names}))
    else:
        _special(chance, folder, path)
    return chance.choice((["plan", name], ["generate", "x", "--model", name, "--num-inference-steps", "1"]))


def _prompts(chance: random.Random, folder: Path) -> list[str]:
    path = folder / "prompts.txt"
    kind = chance.randrange(5)
    if kind == 0:
        path.write_bytes(_garbage(chance))
    elif kind == 1:
        path.write_text("x\n" * chance.choice((10, 20_000, 2_000_000)))
    elif kind == 2:
        path.write_text(
            chance.choice((ESCAPE, "a" * 10**6, "\x00", "\u2028" * 1000, "\ufeff", "=cmd", "😀" * 1000))
        )
    elif kind == 3:
        path.write_bytes("x\ud800".encode("utf-8", "surrogatepass"))
    else:
        _special(chance, folder, path)
    _two_folders(folder)
    return chance.choice(
        (
            ["bench", "--model", "nowhere", "--recipe", "baseline", "--prompts", "prompts.txt"],
            ["quality", "a", "b", "--scorer", "embedded", "--prompts", "prompts.txt"],
        )
    )


def _pictures(chance: random.Random, folder: Path) -> list[str]:
    _two_folders(folder)
    for _ in range(chance.choice((1, 2))):
        name = chance.choice(("0.png", "1.png", f"{ESCAPE}.png", "=1.png", "x.tiff", "y.bmp"))
        both = [folder / side / name for side in ("a", "b")]
        for path in both if name not in ("0.png", "1.png") else both[: chance.choice((1, 2))]:
            path.unlink(missing_ok=True)
            kind = chance.randrange(6)
            if kind == 0:
                path.write_bytes(_garbage(chance))
            elif kind == 1:
                whole = (WEIGHTS / "tiny-clip" / "config.json").read_bytes()
                path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n" + whole)
            elif kind == 2:
                size = chance.choice(((1, 1), (1, 5000), (13_000, 13_000), (5000, 1), (20, 7)))
                Image.new(chance.choice(("1", "L", "P", "RGBA")), size).save(path, format="PNG")
            elif kind == 3:
                path.write_bytes(
                    _png_header(chance.choice((2**31 - 1, 10**6, 0)), chance.choice((2**31 - 1, 1, 0)))
                )
            elif kind == 4:
                Image.effect_noise((64, 64), 80).save(path, format="PNG")
                content = bytearray(path.read_bytes())
                for _ in range(5):
                    content[chance.randrange(len(content))] = chance.randrange(256)
                path.write_bytes(bytes(content[: chance.choice((len(content), len(content) // 2))]))
            else:
                _special(chance, folder, path)
    return ["quality", "a", "b", *chance.choice(([], ["--json"], ["--scorer", "embedded"], ["--lpips"]))]


def _recipe(chance: random.Random, folder: Path) -> list[str]:
    pieces = (
        "steps", "(", ")", "20", "+", "@", ":", ",", "=", "bf16", "quantize", "int8", "tiny_vae", "'", '"', "[", "{",
        "1e400", "9" * 4400, "9" * 400, "-1", "nan", "baseline", "denoiser", "vae", " ", "\0"[:0], ESCAPE, "😀",
        "__import__('os').system('x')", "cfg_cutoff", "0.4", "None", "(" * 200, "steps 20", "lambda: 0", "\\", "mode=",
        "compile", "offload(group)", "deepcache(3)", "1if", "0x10", "1_000", "b''", "1j", "...",
    )  # fmt: skip
    text = "".join(chance.choice(pieces) for _ in range(chance.choice((1, 2, 3, 5, 12))))
    if chance.random() < 0.5:
        text = f"{chance.choice(('steps', 'cfg_cutoff', 'deepcache', 'quantize', 'scheduler'))}({text})"
    return chance.choice(
        (["plan", "nowhere", "--recipe", text], ["bench", "--model", "nowhere", "--recipe", text])
    )


def _options(chance: random.Random, folder: Path) -> list[str]:
    """A command with values that no option should take; `nowhere` is no model, so valid ones end there."""
    path, command = chance.choice(_commands())
    arguments = [*path]
    for parameter in command.params:
        is_option = isinstance(parameter, click.Option)
        if not is_option:
            arguments += ["nowhere"] * max(1, parameter.nargs)
        elif "--model" in parameter.opts:
            arguments += ["--model", "nowhere"]
        elif "--recipe" in parameter.opts:
            arguments += ["--recipe", "baseline"]
    kept = ("--model", "--debug")  # the latter prints tracebacks
    options = [
        candidate
        for candidate in command.params
        if isinstance(candidate, click.Option) and candidate.opts[0] not in kept
    ]
    for option in chance.sample(options, min(len(options), chance.choice((1, 2)))):
        if option.is_flag:
            arguments.append(option.opts[0])
            continue
        values = [*map(str, NUMBERS), "9" * 400, "9" * 5000, "", "x", ESCAPE, "~nobody-here/x", "a\ud800"]
        values += ["/proc/x/y", "/dev/full", ".", "..", "a" * 300, "1e300", "1,2", "clip=nan", "ssim=1e999"]
        values += ["=,=", "../x", "-", "--"]
        arguments += [option.opts[0], *(chance.choice(values) for _ in range(option.nargs))]
    return arguments


def _commands() -> list[tuple[list[str], click.Command]]:
    commands = []
    for name in COMMANDS:
        command = app.get_command(None, name)
        if name == "demo":  # measures for a minute, whatever its options
            continue
        below = command.commands.items() if isinstance(command, click.Group) else ()
        commands += [([name, inner], inner_command) for inner, inner_command in below] or [([name], command)]
    return commands


def _copy(source: Path, target: Path) -> None:
    """Copy small files and link the weights, which are replaced, never changed."""
    shutil.copytree(
        source, target, copy_function=lambda a, b: (os.link if a.endswith("s") else shutil.copy)(a, b)
    )


def _files(model: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in model.rglob("*") if path.suffix in suffixes and path.is_file())


def _change_json(chance: random.Random, folder: Path, model: Path) -> None:
    files = [path for path in _files(model, ".json") if path.stat().st_size < 10_000_000]
    if not files:
        return
    path = chance.choice(files)
    text = path.read_text(errors="surrogateescape")
    kind = chance.randrange(8)
    if kind == 0:
        depth = chance.choice((70, 500, 5000, 200_000))
        changed = chance.choice(('{"a":' * depth + "1" + "}" * depth, "[" * depth + "]" * depth, "[" * depth))
    elif kind == 1:
        start = chance.randrange(max(1, len(text)))
        changed = (
            text[:start]
            + chance.choice(("", "\x00", "}", '"', "9" * 400, "9" * 5000, ESCAPE))
            + text[start + 1 :]
        )
    else:
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return
        changed = json.dumps(_changed(chance, content))
    path.write_text(changed, errors="surrogateescape")


def _changed(chance: random.Random, content: Any) -> Any:
    """Return JSON with one value replaced, removed or added."""
    if isinstance(content, dict) and chance.random() < 0.4:
        sizes = [key for key in SIZES if key in content]
        key = chance.choice(sizes or list(SIZES))
        return content | {
            key: chance.choice((chance.choice(NUMBERS), [chance.choice(NUMBERS)] * 2, chance.choice(ODD)))
        }
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        inner = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        for key, item in list(inner)[:50]:
            places.append((value, key))
            collect(item)

    collect(content)
    if not places:
        return chance.choice(ODD)
    where, key = chance.choice(places)
    kind = chance.randrange(6)
    if kind == 0:
        del where[key]
    elif kind == 1 and isinstance(where, dict):
        where[chance.choice(("../x", ESCAPE, "auto_map", "quantization_config", "_class_name", ""))] = where[
            key
        ]
    else:
        where[key] = chance.choice((chance.choice(NUMBERS), chance.choice(ODD)))
    return content


def _change_weights(chance: random.Random, folder: Path, model: Path) -> None:
    files = _files(model, ".safetensors")
    if not files:
        return
    path = chance.choice(files)
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    path.unlink()
    kind = chance.randrange(4)
    if kind == 0:
        path.write_bytes(whole[: chance.randrange(len(whole))])
    elif kind == 1:
        path.write_bytes(struct.pack("<Q", chance.choice((0, 2, 2**63, 10**8, length + 1))) + whole[8:])
    elif kind == 2:
        path.write_bytes(_garbage(chance))
    else:
        try:
            header = json.loads(whole[8 : 8 + length])
        except ValueError:  # changed before
            path.write_bytes(_garbage(chance))
            return
        name = chance.choice([key for key in header if key != "__metadata__"])
        about = header[name]
        change = chance.choice(
            ("shape", "data_offsets", "dtype", "twice", "name", "metadata", "transpose", "deep")
        )
        if change == "twice":
            text = json.dumps(header)[:-1] + f", {json.dumps(name)}: {json.dumps(about)}}}"
        else:
            if change == "name":
                header[chance.choice((ESCAPE, "x", "../y"))] = header.pop(name)
            elif change == "metadata":
                header["__metadata__"] = chance.choice((*ODD[:20], {"format": ESCAPE}, {"format": "pickle"}))
            elif change == "transpose":
                about["shape"] = about["shape"][::-1]
            elif change == "deep":
                about["shape"] = json.loads("[" * 500 + "]" * 500)
            else:
                options = (
                    *NUMBERS[:12],
                    *ODD[:10],
                    [0, 0],
                    [2**60, 2**60],
                    [-1],
                    [10**39],
                    "F8_E4M3",
                    "Q4_0",
                )
                about[change] = chance.choice(options)
            text = json.dumps(header)
        new = text.encode()
        path.write_bytes(struct.pack("<Q", len(new)) + new + whole[8 + length :])


def _replace_file(chance: random.Random, folder: Path, model: Path) -> None:
    places = [path for path in model.rglob("*") if not path.is_symlink()]
    path = chance.choice(sorted(places))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if chance.random() < 0.8:
        _special(chance, folder, path)


def _special(chance: random.Random, folder: Path, path: Path) -> None:
    """Put something that is no file, or no usual one, at a path."""
    kind = chance.randrange(8)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(
            chance.choice(("/dev/zero", "/dev/random", "/dev/tty", "/proc/self/mem", "nowhere", "."))
        )
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        with path.open("wb") as file:
            file.truncate(chance.choice((10**9, 10**12)))
    elif kind == 4:
        # A prompt file or picture may be a link: the user named it.
        target = folder / (OUTSIDE if path.parent.name not in ("a", "b", folder.name) else "elsewhere")
        target.mkdir(exist_ok=True)
        target /= "secret.json"
        target.write_text(chance.choice(("{}", '{"vocab_size": 1}')))
        path.symlink_to(target)
    elif kind == 5:
        path.symlink_to(path.name)
    elif kind == 6:
        path.write_bytes(b"")
    else:
        path.write_bytes(_garbage(chance))


def _plant(chance: random.Random, folder: Path, model: Path) -> None:
    """Put code and pickles where libraries might look for them."""
    marker = folder / MARKER
    code = f"open({str(marker)!r}, 'w').write('a module')\nclass Evil: pass\n"
    parts = [path for path in model.iterdir() if path.is_dir()] or [model]
    part = chance.choice(sorted(parts))
    for name in ("pipeline.py", "modeling_evil.py", f"{part.name}.py"):
        for place in (model, part):
            (place / name).write_text(code)
    for name in ("diffusion_pytorch_model.bin", "pytorch_model.bin", "model.ckpt", "model.pt"):
        (part / name).write_bytes(pickle.dumps(_Evil(marker)))
    kind = chance.randrange(5)
    index = model / "model_index.json"
    config = next(iter(sorted(part.glob("*config.json"))), None)
    if kind == 0 and config is not None and config.stat().st_size < 10**6:
        _edit(
            config,
            auto_map={"AutoModel": "modeling_evil.Evil", "AutoTokenizer": ["modeling_evil.Evil", None]},
        )
    elif kind == 1 and index.is_file():
        library = chance.choice(
            (part.name, "pipeline", "modeling_evil", "os", "subprocess", "antigravity", "builtins")
        )
        _edit(index, **{part.name: [library, chance.choice(("Evil", "Popen", "exec", "system"))]})
    elif kind == 2 and index.is_file():
        _edit(
            index,
            _class_name=chance.choice(
                (["pipeline", "Evil"], "Evil", "pipeline.Evil", ["pipeline.py", "Evil"])
            ),
        )
    elif kind == 3:
        for path in part.glob("*.safetensors"):
            path.unlink()
    else:
        (part / "adapter_config.json").write_text(
            '{"base_model_name_or_path": "../outside", "peft_type": "LORA"}'
        )


def _index(chance: random.Random, folder: Path, model: Path) -> None:
    """A shard index that names files elsewhere."""
    part = model / chance.choice(("unet", "text_encoder", "vae"))
    if not part.is_dir():
        return
    (folder / OUTSIDE / "evil.bin").write_bytes(pickle.dumps(_Evil(folder / MARKER)))
    (folder / OUTSIDE / "evil.safetensors").write_bytes(_safetensors(chance, {"x": [1]}))
    target = chance.choice(
        (
            "../../outside/evil.bin",
            "../../outside/evil.safetensors",
            str(folder / OUTSIDE / "evil.bin"),
            "x.bin",
            7,
        )
    )
    stem = "model" if part.name == "text_encoder" else "diffusion_pytorch_model"
    content = {"metadata": {"total_size": 8}, "weight_map": {"x": target}}
    (part / f"{stem}.safetensors.index.json").write_text(json.dumps(content))
    if chance.random() < 0.5:
        whole = part / f"{stem}.safetensors"
        if whole.exists():
            whole.rename(part / f"{stem}-00001-of-00001.safetensors")


def _edit(path: Path, **changes: Any) -> None:
    try:
        content = json.loads(path.read_text())
    except (ValueError, RecursionError):
        return
    if isinstance(content, dict):
        path.write_text(json.dumps(content | changes))


def _two_folders(folder: Path) -> None:
    for side, shade in (("a", 80), ("b", 90)):
        (folder / side).mkdir()
        for k in range(2):
            Image.linear_gradient("L").resize((48, 48)).point(lambda v, s=shade: (v + s) % 256).convert(
                "RGB"
            ).save(folder / side / f"{k}.png")


def _garbage(chance: random.Random) -> bytes:
    return chance.choice(
        (b"\x89PNG\r\n\x1a\n", b"GGUF\x03\x00\x00\x00", b"{", b"\x80\x04", b"PK\x03\x04", b"")
    ) + (chance.randbytes(chance.choice((0, 8, 100, 5000))))


def _safetensors(chance: random.Random, shapes: dict[str, list[int]]) -> bytes:
    header, end = {}, 0
    for name, shape in shapes.items():
        start, size = end, 4
        for length in shape:
            size *= length
        end = start + size
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


def _png_header(width: int, height: int) -> bytes:
    import zlib

    data = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + data
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", len(data)) + chunk + struct.pack(">I", zlib.crc32(chunk))
