"""The `hicache-ext` command: argument parsing only; each verb is a module beside this one.

Exit codes: 0 all is well, 1 something was found, 2 the input is wrong, 3 it does not work here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:  # the extra that brings the command's two libraries is missing
    sys.exit("hicache-ext needs typer and rich -> pip install 'sglang-hicache-ext[cli]'")

from sglang_hicache_ext import __version__
from sglang_hicache_ext.cli.render import BAD_INPUT, SEVERE, Output
from sglang_hicache_ext.config import parse_size
from sglang_hicache_ext.errors import ConfigError, HiCacheExtError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

Paths = Annotated[list[str], typer.Argument(help="Directories of the store, in the order of its path.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Which = Annotated[
    str, typer.Option("--namespace", help="Namespace id (first hex digits), or a word of its fingerprint.")
]
Tokens = Annotated[str, typer.Option("--tokens", help='Token ids: "1 2 3" or a JSON list.')]
TokensFile = Annotated[str, typer.Option("--tokens-file", help="File with token ids.")]

BEHIND_SERVERS = frozenset({"inspect", "verify", "gc", "export", "import"})
_AGE = re.compile(r"^(\d+(?:\.\d+)?)([smhd])$")


def _run(as_json: bool, verb: Callable[[Output], int]) -> None:
    """Run a verb and leave with its code; our own errors become one line."""
    out = Output(as_json)
    try:
        code = verb(out)
    except ConfigError as err:
        out.error(str(err))
        code = BAD_INPUT
    except (HiCacheExtError, OSError) as err:
        out.error(str(err))
        code = SEVERE
    raise typer.Exit(code)


def _seconds(text: str) -> float | None:
    """Seconds from "90s", "30m", "12h", "7d"; None for ""."""
    if not text:
        return None
    match = _AGE.match(text.strip())
    if match is None:
        raise ConfigError(f"not an age: {text!r}", "--older-than", 'write "90s", "30m", "12h" or "7d"')
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400}[match[2]]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"hicache-ext {__version__}")
        raise typer.Exit


@app.command()
def doctor(
    paths: Annotated[list[str] | None, typer.Argument(help="Directories to check.")] = None,
    capacity: Annotated[str, typer.Option(help='Capacity you plan, "2TiB".')] = "",
    gds: Annotated[bool, typer.Option("--gds", help="Only GPUDirect Storage, stage by stage.")] = False,
    as_json: AsJson = False,
) -> None:
    """What is here, what works, how that is known, and what to change."""
    from sglang_hicache_ext.cli import doctor as verb

    _run(as_json, lambda out: verb.run(paths or [], parse_size(capacity, "--capacity") if capacity else None, gds, out))


@app.command()
def inspect(paths: Paths, namespace: Which = "", as_json: AsJson = False) -> None:
    """Pages and bytes by model, with the fingerprint in words, age and heat."""
    from sglang_hicache_ext.cli import inspect as verb

    _run(as_json, lambda out: verb.run(paths, namespace, out))


@app.command()
def verify(
    paths: Paths,
    namespace: Which = "",
    sample: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the pages to check.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sample.")] = 0,
    rate: Annotated[str, typer.Option(help="Bytes a second to read at most; 0 for no limit.")] = "128MiB",
    as_json: AsJson = False,
) -> None:
    """Read pages back and check what they hold; a page that fails is dropped."""
    from sglang_hicache_ext.cli import verify as verb

    _run(as_json, lambda out: verb.run(paths, namespace, sample, seed, parse_size(rate, "--rate"), out))


@app.command()
def gc(
    paths: Paths,
    namespace: Which = "",
    older_than: Annotated[str, typer.Option(help='Age: "90s", "30m", "12h", "7d".')] = "",
    keep: Annotated[str, typer.Option(help='Payload to keep, youngest first: "100GiB".')] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Do it; without it the plan is only shown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Forget pages by namespace, age or size; a dry run unless --apply."""
    from sglang_hicache_ext.cli import gc as verb

    _run(
        as_json,
        lambda out: verb.run(
            paths, namespace, _seconds(older_than), parse_size(keep, "--keep") if keep else None, apply, out
        ),
    )


@app.command()
def export(
    target: Annotated[Path, typer.Argument(help="Archive to write.")],
    paths: Paths,
    namespace: Which = "",
    tokens: Tokens = "",
    tokens_file: TokensFile = "",
    only_read: Annotated[bool, typer.Option("--only-read", help="Only pages read since they were written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write chosen pages to a portable archive."""
    from sglang_hicache_ext.cli import transfer as verb
    from sglang_hicache_ext.cli.explain import read_tokens

    def go(out: Output) -> int:
        ids = read_tokens(tokens, tokens_file, "", "") if tokens or tokens_file else []
        return verb.export(paths, target, namespace, ids, only_read, out)

    _run(as_json, go)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="Archive to read.")], paths: Paths, as_json: AsJson = False
) -> None:
    """Take the pages of an archive into a store; a damaged page is refused, the others go on."""
    from sglang_hicache_ext.cli import transfer as verb

    _run(as_json, lambda out: verb.load(paths, source, out))


@app.command()
def explain(
    paths: Paths,
    tokens: Tokens = "",
    tokens_file: TokensFile = "",
    text: Annotated[str, typer.Option(help="The prompt itself; needs --model for its tokenizer.")] = "",
    model: Annotated[str, typer.Option(help="Local model directory.")] = "",
    namespace: Which = "",
    threshold: Annotated[int, typer.Option(min=0, help="prefetch_threshold of the server, in tokens.")] = 256,
    as_json: AsJson = False,
) -> None:
    """Why a prompt is, or is not, a hit: one outcome per page."""
    from sglang_hicache_ext.cli import explain as verb

    _run(
        as_json,
        lambda out: verb.run(paths, verb.read_tokens(tokens, tokens_file, text, model), namespace, threshold, out),
    )


@app.command()
def wait(
    paths: Paths,
    tokens: Tokens = "",
    tokens_file: TokensFile = "",
    text: Annotated[str, typer.Option(help="The prompt itself; needs --model for its tokenizer.")] = "",
    model: Annotated[str, typer.Option(help="Local model directory.")] = "",
    namespace: Which = "",
    ranks: Annotated[int, typer.Option(min=1, help="Shards that must have it: the tensor parallel size.")] = 1,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait at most.")] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Block until a prompt's pages are durable, whichever server writes them."""
    from sglang_hicache_ext.cli import wait as verb
    from sglang_hicache_ext.cli.explain import read_tokens

    _run(
        as_json,
        lambda out: verb.run(paths, read_tokens(tokens, tokens_file, text, model), namespace, ranks, timeout, out),
    )


@app.command()
def bench(
    path: Annotated[str, typer.Argument(help="Directory on the drive to measure.")],
    page: Annotated[str, typer.Option(help="Bytes of a page.")] = "256KiB",
    total: Annotated[str, typer.Option(help="Bytes to write and read.")] = "1GiB",
    model: Annotated[str, typer.Option(help="Local model directory: verdict in tokens, page size from it.")] = "",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    prefill: Annotated[float, typer.Option(min=0, help="Prefill rate in tokens/s, to compare with.")] = 0.0,
    as_json: AsJson = False,
) -> None:
    """How fast a store on this drive is; one verdict line."""
    from sglang_hicache_ext.cli import bench as verb
    from sglang_hicache_ext.cli.launch import PAGE_TOKENS, read_shape

    def go(out: Output) -> int:
        page_bytes, token_bytes = parse_size(page, "--page"), 0
        if model:
            page_bytes = read_shape(model).page_bytes(tp)
            token_bytes = page_bytes // PAGE_TOKENS
        if not 4096 <= page_bytes <= 1 << 28:
            raise ConfigError(f"page is {page_bytes} bytes", "--page", "write 4KiB to 256MiB")
        return verb.run(path, page_bytes, parse_size(total, "--total"), token_bytes, prefill, out)

    _run(as_json, go)


@app.command()
def launch(
    model: Annotated[str, typer.Argument(help="Local model directory.")],
    paths: Annotated[list[str], typer.Argument(help="Directories for the store, one a drive.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size.")] = 1,
    capacity: Annotated[str, typer.Option(help="Capacity; 9/10 of what is free when left out.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print the SGLang flags for this machine and model, with reasons."""
    from sglang_hicache_ext.cli import launch as verb

    def go(out: Output) -> int:
        if capacity:
            parse_size(capacity, "--capacity")
        return verb.run(model, paths, tp, capacity, out)

    _run(as_json, go)


@app.command()
def warm(
    what: Annotated[str, typer.Argument(help="publish: list what this node holds. fill: fetch it, hottest first.")],
    config: Annotated[Path, typer.Option(help="JSON file with the options of the backend (path, master, ...).")],
    budget: Annotated[str, typer.Option(help='Bytes to write at most: "100GiB".')] = "",
) -> None:
    """Fill a fresh node's NVMe from the remote tier: bounded, resumable, JSON on stdout."""
    from sglang_hicache_ext.cli import warm as verb

    _run(False, lambda out: verb.run(what, config, parse_size(budget, "--budget") if budget else None))


def main() -> None:
    """Entry point of the console script. What goes through a whole store steps back behind the servers that use it."""
    if BEHIND_SERVERS.intersection(sys.argv[1:2]):
        from sglang_hicache_ext.cli.offline import step_back

        step_back()
    app()


if __name__ == "__main__":
    main()
