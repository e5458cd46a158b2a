"""Parses the command line of `stoker serve` like TensorFlow Serving's, and ignores flags that have no effect."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand

ARGUMENTS = "stoker.serve.arguments"
"""Key, in the context, of the arguments after `serve`, with which workers are started."""

_RETRY = "a version that failed is tried again only when its files change"
_POOL = "every model loads in a thread of its own"
_XLA = "models that XLA must compile are always served"

MEANINGLESS = {
    "--max_num_load_retries": _RETRY,
    "--load_retry_interval_micros": _RETRY,
    "--num_load_threads": _POOL,
    "--num_unload_threads": _POOL,
    "--flush_filesystem_caches": "the kernel's cache is left to the kernel",
    "--remove_unused_fields_from_bundle_metagraph": "the graph is kept as it is",
    "--platform_config_file": "every model runs by TensorFlow, as the other flags say",
    "--num_tflite_interpreters_per_pool": "requests to a model.tflite are joined as to any other model",
    "--xla_cpu_compilation_enabled": _XLA,
    "--xla_gpu_compilation_enabled": _XLA,
    "--thread_pool_factory_config_file": "threads are set by the --tensorflow_ flags",
    "--skip_initialize_tpu": "no TPU is initialized",
    "--use_alts_credentials": "clients are known by --ssl_config_file or --keys-file",
    "--enable_grpc_healthcheck_service": "the health service always answers",
}
"""Accepted flags of TensorFlow Serving that have no effect -> reason."""

_BARE = (
    "--flush_filesystem_caches",
    "--remove_unused_fields_from_bundle_metagraph",
    "--xla_cpu_compilation_enabled",
    "--xla_gpu_compilation_enabled",
    "--skip_initialize_tpu",
    "--use_alts_credentials",
    "--enable_grpc_healthcheck_service",
)
"""Flags of `MEANINGLESS` that may be given without a value."""

_ONE_MODEL = ("--model_name", "--model-name", "--model_base_path", "--model-base-path")
_MODELS = ("--model_config_file", "--model-config-file")
"""The spellings of a flag that overrides the flags in `_ONE_MODEL`, as in TensorFlow Serving."""

_TRUTH = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


class ServeCommand(TyperCommand):
    """Command that also accepts TensorFlow Serving's form of flags: `--enable_batching=true`."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """List the flags of TensorFlow Serving that are accepted but have no effect."""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("Accepted, but without effect: " + " ".join(MEANINGLESS))
        super().format_epilog(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """For boolean flags, turn `--flag=true` into `--flag`, and `--flag=false` into `--no-flag` or nothing."""
        flags = {
            name: next(iter(option.secondary_opts), "")
            for option in self.params
            if getattr(option, "is_flag", False)
            for name in option.opts
        }
        args, passed_over = without_meaningless(args)
        for why in dict.fromkeys(passed_over.values()):
            names = [name for name, reason in passed_over.items() if reason == why]
            is_or_are = "is" if len(names) == 1 else "are"
            typer.echo(f"stoker: {', '.join(names)} {is_or_are} passed over: {why}", err=True)
        # Workers get their GPUs through the environment: all selected ones or a subset.
        ctx.meta[ARGUMENTS] = without_option(args, "--gpus")
        return super().parse_args(ctx, [plain for arg in args for plain in _plain(arg, flags)])


def without_meaningless(args: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the arguments without flags that have no effect, and a dict of these flags -> reason."""
    meaningless = dict(MEANINGLESS)
    if any(arg.partition("=")[0] in _MODELS for arg in args):
        meaningless |= dict.fromkeys(_ONE_MODEL, "--model_config_file names the models")
    kept: list[str] = []
    found: dict[str, str] = {}
    left = iter(args)
    for arg in left:
        name, equals, _ = arg.partition("=")
        if name not in meaningless:
            kept.append(arg)
            continue
        found[name] = meaningless[name]
        if not equals and name not in _BARE:
            next(left, None)
    return kept, found


def without_option(args: list[str], name: str) -> list[str]:
    """Return the arguments without one option and its value: `--name VALUE` or `--name=VALUE`."""
    kept: list[str] = []
    left = iter(args)
    for arg in left:
        if arg == name:
            next(left, None)
        elif not arg.startswith(f"{name}="):
            kept.append(arg)
    return kept


def _plain(argument: str, flags: dict[str, str]) -> list[str]:
    name, equals, value = argument.partition("=")
    truth = _TRUTH.get(value.lower())
    if not equals or name not in flags or truth is None:
        return [argument]
    if truth:
        return [name]
    return [flags[name]] if flags[name] else []
