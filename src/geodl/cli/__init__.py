"""The command line: thin. Each command parses, calls, prints; it is imported only when it is used."""

import difflib
import logging
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError, Group, UnknownCommandError, UnusedCliTokensError

from geodl import __version__
from geodl.cli import signals
from geodl.errors import GeodlError
from geodl.text import one_line, printable

OWN = Group("Your own images", sort_key=1)
RESEARCH = Group("Experiments", sort_key=2)
ABOUT = Group("About this installation", sort_key=3)
ACTIONS = Group("What it can do")

app = App(
    name="geodl",
    version=__version__,
    help="Teach an image classifier new classes without forgetting the old ones.\n\n"
    "Start with `geodl learn MODEL FOLDER` for images of your own, or `geodl compare finetune lucir lucir+geodesic --preset digits` "
    "for an experiment; `geodl COMMAND --help` says more.",
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main has a sentence for it
)

# Commands with commands of their own.
_GROUPS = {
    "config": (RESEARCH, "Show the effective configuration and where each value comes from, or list the presets."),
    "runs": (RESEARCH, "List runs with their state and result; show or remove one."),
    "results": (RESEARCH, "Keep the results of runs as small files; write a page from them."),
    "cache": (ABOUT, "Show or clear the cache of trained base phases."),
}
# name, where it is, group, what it does, an example
COMMANDS = [
    (
        "learn",
        "own:learn",
        OWN,
        "Learn the classes in a folder of class folders: new ones, and more images of known ones. Old images are not needed. "
        "Stopped or killed, the same command goes on.",
        "geodl learn flowers/ week1/",
    ),
    (
        "predict",
        "own:predict",
        OWN,
        "Say what is in images: the class and how sure the model is (softmax of the learned scale times the cosines with the "
        "class means).",
        "geodl predict flowers/ photo.jpg more/ --top 3",
    ),
    (
        "evaluate",
        "own:evaluate",
        OWN,
        "Say how good a model is on images whose classes you know: overall, by class, by learning step, and what it mixes up.",
        "geodl evaluate flowers/ test/",
    ),
    (
        "info",
        "own:info",
        OWN,
        "Say what a model knows and keeps: classes and when they were learned, stored images, sizes, accuracy so far.",
        "geodl info flowers/",
    ),
    ("undo", "own:undo", OWN, "Take the last step of a model back.", "geodl undo flowers/"),
    ("redo", "own:redo", OWN, "Bring back what undo took back last.", "geodl redo flowers/"),
    ("rename", "own:rename", OWN, "Give a class another name.", "geodl rename flowers/ daisy marguerite"),
    ("remove", "own:remove", OWN, "Remove a class and its images from a model.", "geodl remove flowers/ daisy"),
    (
        "export",
        "own:export",
        OWN,
        "Write a model as one ONNX file with labels and preprocessing inside and no images, checked against the model.",
        "geodl export flowers/ flowers.onnx",
    ),
    (
        "serve",
        "serve:serve",
        OWN,
        "Serve a model on a page, where one can recognize, teach, correct and take back; and to programs over HTTP.",
        "geodl serve flowers/",
    ),
    (
        "run",
        "run:run",
        RESEARCH,
        "Run one incremental experiment: base classes first, then new classes phase by phase. Killed at any moment, the same "
        "command continues; a complete run prints its result.",
        "geodl run --preset digits --method lucir --distill geodesic",
    ),
    (
        "compare",
        "run:compare",
        RESEARCH,
        "Run several methods under one protocol, one after the other, and put them in one table.",
        "geodl compare finetune lucir lucir+geodesic --preset digits",
    ),
    (
        "sweep",
        "sweep:app",
        RESEARCH,
        "Run a grid or a search, several runs at a time: here, on a Ray cluster or by SLURM. Complete runs are left out; "
        "`geodl sweep status` shows how far it is.",
        "geodl sweep --preset digits --grid method=lucir,icarl --grid seed=1,2,3",
    ),
    (
        "methods",
        "about:methods",
        RESEARCH,
        "List the methods with their papers and their own defaults.",
        "geodl methods",
    ),
    (
        "config show",
        "about:show",
        RESEARCH,
        "Print every option with its value and where it comes from: default, default of the method, preset, file, command line.",
        "geodl config show --preset cifar100 --method bic",
    ),
    (
        "config presets",
        "about:show_presets",
        RESEARCH,
        "List the presets that ship with the package.",
        "geodl config presets",
    ),
    (
        "runs list",
        "runs:list_all",
        RESEARCH,
        "List the runs below a directory with state and result.",
        "geodl runs list",
    ),
    ("runs show", "runs:show", RESEARCH, "Show the result of one run so far.", "geodl runs show runs/NAME"),
    ("runs rm", "runs:rm", RESEARCH, "Remove a run's directory.", "geodl runs rm runs/NAME"),
    (
        "report",
        "report:report",
        RESEARCH,
        "Write one self-contained HTML page about one or several runs, or about a model. Runs that differ in their seed alone "
        "are averaged; runs whose protocol the paper has numbers for stand beside them.",
        "geodl report runs/* --out comparison.html --figures figures/ --tables tables/",
    ),
    (
        "reproduce",
        "reproduce:reproduce",
        RESEARCH,
        "Run what a table or figure of the paper needs and write it beside the published numbers: table1 to table4, init10, "
        "fig-phases, fig-classifiers, fig-cca, time-memory, or all. Complete runs are not run again.",
        "geodl reproduce table1 --length smoke --runs 1",
    ),
    (
        "results add",
        "results:add",
        RESEARCH,
        "Write what complete runs reached into small JSON files, one a run.",
        "geodl results add runs/* --to results/cifar100-cpu",
    ),
    (
        "results write",
        "results:write",
        RESEARCH,
        "Write a page from such files: every row of the paper, and whether its comparisons hold.",
        "geodl results write results/cifar100-cpu --out docs/results/cifar100-cpu.md",
    ),
    ("cache show", "runs:show_cache", ABOUT, "Show where the cache is and how large.", "geodl cache show"),
    ("cache clear", "runs:clear", ABOUT, "Remove all trained base phases from the cache.", "geodl cache clear"),
    (
        "doctor",
        "about:doctor",
        ABOUT,
        "Say what a bug report needs: versions, devices, threads, extras, data.",
        "geodl doctor",
    ),
]


def _list_runs() -> None:
    from geodl.cli.runs import list_all

    list_all()


def _register() -> None:
    parents = {name: App(name=name, help=text, group=group) for name, (group, text) in _GROUPS.items()}
    parents["runs"].default(_list_runs)
    for parent in parents.values():
        app.command(parent)
    for path, target, group, text, example in COMMANDS:
        *above, name = path.split()
        place, own = (parents[above[0]], ACTIONS) if above else (app, group)
        more = {} if target.endswith(":app") else {"help_epilogue": f"Example: `{example}`"}  # it has its own
        place.command(f"geodl.cli.{target}", name=name, help=text, group=own, **more)


_register()
app.register_install_completion_command(group=ABOUT)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; errors on purpose are one line and exit code 2."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of the libraries, for developers: a user could do nothing about them
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    try:
        with signals.terminating():
            status = app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
    except UnknownCommandError as error:
        _fail(_no_such_command(error.unused_tokens or []))
    except UnusedCliTokensError as error:
        _fail(
            f"{' '.join(error.unused_tokens or [])}: more than this command takes; `geodl COMMAND --help` says what it takes"
        )
    except CycloptsError as error:
        _fail(one_line(error))
    except GeodlError as error:
        _fail(str(error), signals.status() if type(error).__name__ == "Interrupted" else 2)
    except KeyboardInterrupt:
        _fail("interrupted; what was complete before is kept", 130)
    except signals.Terminated:
        _fail("terminated; what was complete before is kept", 143)
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has left: nothing to say, nobody to hear it
        sys.exit(0)
    except OSError as error:  # what a user named cannot be there, such as a name that is too long
        _fail(f"{one_line(str(error.filename), 100)}: {error.strerror}" if error.filename else one_line(error))
    sys.exit(status if isinstance(status, int) else 0)


def _no_such_command(tokens: list[str]) -> str:
    names = sorted({*_GROUPS, *(path for path, *_ in COMMANDS)})
    word = tokens[0] if tokens else ""
    close = difflib.get_close_matches(word, names, n=1)
    return f"{word}: no such command; " + (f"did you mean {close[0]}?" if close else "`geodl --help` lists them")


def _fail(message: str, status: int = 2) -> NoReturn:
    print(f"geodl: {printable(message)}", file=sys.stderr)
    sys.exit(status)
