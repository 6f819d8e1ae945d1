"""The command line: thin. Each command parses, calls, prints; it is imported only when it is used."""

import difflib
import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

from cyclopts import App, CycloptsError, Group, UnknownCommandError, UnusedCliTokensError

from geodl import __version__
from geodl.cli import signals
from geodl.errors import GeodlError, Interrupted
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
# group -> where it is -> what it does, and an example, which begins with its name
_COMMANDS = {
    OWN: {
        "own:learn": (
            "Learn the classes in a folder of class folders: new ones, and more images of known ones. Old images are "
            "not needed. Stopped or killed, the same command goes on.\n\n"
            "The first learn makes the model's directory. Afterwards the images are not needed any more: the model keeps what "
            "it needs of them; `geodl info` says what that is.",
            "geodl learn flowers/ week1/",
        ),
        "own:predict": (
            'Say what is in images: the class and how sure the model is, or "unknown" for an image unlike all classes.\n\n'
            "How sure is the softmax of the classifier's scores: in closed form at a temperature fitted to learned images, "
            "each left out in turn; of a trained network, the learned scale times the cosines with the class means (with "
            "--classifier cnn, with the rows of the last layer). Only models in closed form say unknown by themselves; "
            "--threshold makes any do so.",
            "geodl predict flowers/ photo.jpg more/ --top 3",
        ),
        "own:evaluate": (
            "Say how good a model is on images whose classes you know, none of which it has learned: overall, by class, by "
            "learning step, and what it mixes up. "
            'Accuracy is by the likeliest class; "unknown" is not counted.',
            "geodl evaluate flowers/ test/",
        ),
        "own:info": (
            "Say what a model knows and keeps: classes and when they were learned, stored images, sizes, accuracy so far.",
            "geodl info flowers/",
        ),
        "own:undo": (
            "Take the last step back (learn, rename or remove); `geodl info` says how many steps can be. `geodl redo` brings it "
            "back until the next change.",
            "geodl undo flowers/",
        ),
        "own:redo": (
            "Bring back what `geodl undo` took back last, unless the model was changed since.",
            "geodl redo flowers/",
        ),
        "own:rename": ("Give a class another name.", "geodl rename flowers/ daisy marguerite"),
        "own:remove": ("Remove a class and its images from a model.", "geodl remove flowers/ daisy"),
        "own:export": (
            "Write a model as one ONNX file with labels and preprocessing inside and no images, checked against the model.",
            "geodl export flowers/ flowers.onnx",
        ),
        "serve:serve": (
            "Serve a model on a page, where one can recognize, teach, correct and take back; and to programs over HTTP.\n\n"
            "Only this machine can reach it unless --host says otherwise. What changes the model needs a token: it is part "
            "of the address that is printed, or the value of the environment variable GEODL_TOKEN.",
            "geodl serve flowers/",
        ),
    },
    RESEARCH: {
        "run:run": (
            "Run one incremental experiment: base classes first, then new classes phase by phase. Killed at any "
            "moment, the same command continues; a complete run prints its result.",
            "geodl run --preset digits --method lucir --distill geodesic",
        ),
        "run:compare": (
            "Run several methods under one protocol, one after the other, and put them in one table.",
            "geodl compare finetune lucir lucir+geodesic --preset digits",
        ),
        "sweep:app": (
            "Run a grid or a search, several runs at a time: here, on a Ray cluster or by SLURM. Complete runs are "
            "left out; `geodl sweep status` shows how far it is.",
            "geodl sweep --preset digits --grid method=lucir,icarl --grid seed=1,2,3",
        ),
        "about:methods": ("List the methods with their papers and their own defaults.", "geodl methods"),
        "about:show": (
            "Print every option with its value and where it comes from: default, default of the method, preset, file, "
            "command line.",
            "geodl config show --preset cifar100 --method bic",
        ),
        "about:show_presets": ("List the presets that ship with the package.", "geodl config presets"),
        "runs:list_all": ("List the runs below a directory with state and result.", "geodl runs list"),
        "runs:show": ("Show the result of one run so far.", "geodl runs show runs/NAME"),
        "runs:rm": ("Remove a run's directory.", "geodl runs rm runs/NAME"),
        "report:report": (
            "Write one self-contained HTML page about one or several runs, or about a model. Runs that differ in their "
            "seed alone are averaged; runs whose protocol the paper has numbers for stand beside them.",
            "geodl report runs/* --out comparison.html --figures figures/ --tables tables/",
        ),
        "reproduce:reproduce": (
            "Run what a table or figure of the paper needs and write it beside the published numbers: table1 to "
            "table4, init10, fig-phases, fig-classifiers, fig-cca, time-memory, or all of them; or beyond (the closed form "
            "over given weights). Complete runs are not run again.",
            "geodl reproduce table1 --length smoke --runs 1",
        ),
        "results:add": (
            "Write what complete runs reached into small JSON files, one a run.",
            "geodl results add runs/* --to results/cifar100-cpu",
        ),
        "results:write": (
            "Write a page from the files of `geodl results add`: every row of the paper, and its comparisons with their intervals.",
            "geodl results write results/cifar100-cpu --out docs/results/cifar100-cpu.md",
        ),
    },
    ABOUT: {
        "runs:show_cache": ("Show where the cache is and how large.", "geodl cache show"),
        "runs:clear": ("Remove all trained base phases from the cache.", "geodl cache clear"),
        "about:doctor": ("Say what a bug report needs: versions, devices, threads, extras, data.", "geodl doctor"),
    },
}
COMMANDS = [
    (" ".join(example.split()[1 : 3 if example.split()[1] in _GROUPS else 2]), target, group, text, example)
    for group, commands in _COMMANDS.items()
    for target, (text, example) in commands.items()
]
"""Name, where it is, group, what it does, an example."""


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
        with signals.handled(signals.leave, signal.SIGTERM):
            status = app(sys.argv[1:] if arguments is None else arguments, exit_on_error=False, print_error=False)
    except UnknownCommandError as error:
        _fail(_no_such_command(error.unused_tokens or []))
    except UnusedCliTokensError as error:
        _fail(
            f"{' '.join(error.unused_tokens or [])}: more than this command takes; `geodl COMMAND --help` says what it takes"
        )
    except CycloptsError as error:
        _fail(one_line(error))
    except Interrupted as stop:
        _fail(str(stop), signals.status())
    except GeodlError as error:
        _fail(str(error))
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
