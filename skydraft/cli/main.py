"""`skydraft`: the entry point. Only here do errors become a line on stderr and an exit status."""

import io
import os
import signal
import sys
from collections.abc import Sequence as Seq

import click

from skydraft import __version__
from skydraft.cli import learn_run  # noqa: F401  a command of learn
from skydraft.cli.caption import caption
from skydraft.cli.chat import chat
from skydraft.cli.compare import calibrate, compare, report
from skydraft.cli.doctor import doctor
from skydraft.cli.gateway import gateway
from skydraft.cli.generate import INTERRUPTED, generate
from skydraft.cli.learn import learn
from skydraft.cli.models import models
from skydraft.cli.serve import serve
from skydraft.cli.terminal import TERMINAL
from skydraft.errors import SkydraftError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, "-V", "--version", prog_name="skydraft")
def cli() -> None:
    """A small model drafts text, and a large model checks it. A gate can choose which parts to check.

    The small one is called the draft model; it runs on the edge (this device). The large one is called the target; it
    runs here or on a server (the cloud).

    \b
    skydraft models fetch qwen2.5-coder-0.5b qwen2.5-coder-1.5b
    skydraft generate "What is the difference between TCP and UDP?"
    skydraft chat
    skydraft gateway
    skydraft serve
    skydraft generate "What is the difference between TCP and UDP?" --cloud localhost:7373
    """


for command in (generate, chat, gateway, serve, models, doctor, caption, compare, report, calibrate, learn):
    cli.add_command(command)


def main(args: Seq[str] | None = None) -> None:
    """Run a command and exit. Treat SIGHUP (a closed terminal) like SIGTERM, except under `nohup`."""
    if os.name == "posix" and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    sys.exit(run(args))


def run(args: Seq[str] | None = None) -> int:
    """Run a command and return its exit status: 0 on success, 1 on failure, 2 on wrong use, 130 after Ctrl-C."""
    _fill_streams()
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.encoding.lower() == "utf-8":
        sys.stdin.reconfigure(encoding="utf-8-sig", errors=sys.stdin.errors)  # drops a byte order mark
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a question mark for characters that the terminal cannot show
    try:
        status = cli.main(args, prog_name="skydraft", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except SkydraftError as error:
        return _fail(error.line, error.exit_status)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "skydraft"
        says = error.format_message()
        says = says if says.endswith((".", "?", "?)")) else f"{says}."
        if path.endswith(" generate") and "extra argument" in says:
            says += " Put a prompt of several words in quotes."
        return _fail(f"{says} See: {path} --help", error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("Interrupted.", INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has closed the pipe. The interpreter must not report that again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(f"{error.strerror or error}: {error.filename or 'the system refused'}.", 1)


def _fill_streams() -> None:
    """Replace streams that the shell closed (`2>&-`) by the null device. Each open takes the lowest free number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the process ends


def _fail(message: str, status: int) -> int:
    TERMINAL.say(message)
    return status


if __name__ == "__main__":
    main()
