"""The command line. Each command parses, calls and prints; its module is imported only when it is used."""

import logging
import signal
import sys
import warnings
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError

from geodl import __version__
from geodl.cli import signals
from geodl.core.errors import GeodlError, Interrupted
from geodl.core.text import one_line, printable

OWN = Group("Your own images", sort_key=1)
RESEARCH = Group("Experiments", sort_key=2)
ABOUT = Group("About this installation", sort_key=3)
ACTIONS = Group("Actions")


class Command(NamedTuple):
    """A command: its name, its function (MODULE:FUNCTION below geodl.cli), its group, help and an example."""

    name: str
    function: str
    group: Group
    text: str
    example: str


# Commands with subcommands.
PARENTS = {
    "config": (RESEARCH, "Show the effective configuration, or list the presets."),
    "runs": (RESEARCH, "List runs with their state and result; show or remove one."),
    "cache": (ABOUT, "Show or clear the cache of trained base phases and converted models."),
}
COMMANDS = [
    Command(
        "learn", "own:learn", OWN,
        "Learn the classes in a folder of class folders: new classes, and more images of known ones. An interrupted step resumes with "
        "the same command.\n\nThe first step creates the model's directory. Afterwards the images are no longer needed: `geodl info` "
        "lists what the model keeps of them.",
        "learn flowers/ week1/",
    ),
    Command(
        "predict", "own:predict", OWN,
        'Name the class of images, with a confidence, or "unknown" for an image unlike all classes.\n\n'
        "The confidence is the softmax of the classifier's scores: in closed form at a temperature fitted to learned images, each left "
        "out in turn, times the probability that the image is of a known class; for a trained network, the learned scale times the cosines with the class means (with --classifier cnn, with the "
        "rows of the last layer). Only models in closed form answer unknown by default; --threshold enables it for any model.",
        "predict flowers/ photo.jpg more/ --top 3",
    ),
    Command(
        "evaluate", "own:evaluate", OWN,
        "Measure accuracy on images with known classes that the model has not learned: overall, by class, by learning step, and the most "
        'frequent confusions. Accuracy counts the likeliest class, also of images that `geodl predict` calls "unknown".',
        "evaluate flowers/ test/",
    ),
    Command(
        "info", "own:info", OWN,
        "Describe a model: classes and when they were learned, stored images, sizes, accuracy so far.",
        "info flowers/",
    ),
    Command(
        "undo", "changes:undo", OWN,
        "Undo the last step (learn, rename, remove, relabel or forget); `geodl redo` restores it until the next change.",
        "undo flowers/",
    ),
    Command(
        "redo", "changes:redo", OWN,
        "Restore the step that `geodl undo` undid last, unless the model was changed since.",
        "redo flowers/",
    ),
    Command("rename", "changes:rename", OWN, "Rename a class.", "rename flowers/ daisy marguerite"),
    Command("remove", "changes:remove", OWN, "Remove a class and its images.", "remove flowers/ daisy"),
    Command(
        "relabel", "changes:relabel", OWN,
        "Move a learned image to its right class, as if it had been learned that way from the start (closed form).",
        "relabel flowers/ week1/daisy/7.jpg rose",
    ),
    Command(
        "forget", "changes:forget", OWN,
        "Forget learned images, as if they had never been learned (closed form). Earlier states, which "
        "`geodl undo` restores, still hold them.",
        "forget flowers/ week1/daisy/7.jpg",
    ),
    Command(
        "export", "changes:export", OWN,
        "Write a model as one ONNX file with labels and preprocessing and without images, checked against the model; or, with "
        "--format web, as a folder with a page that recognizes images and camera frames in the browser.",
        "export flowers/ flowers.onnx",
    ),
    Command(
        "serve", "serve:serve", OWN,
        "Serve a model as a web page to predict, teach, correct and undo, and to programs over HTTP.\n\n"
        "Only this machine can reach it unless --host names another address. Changing the model needs a token: it is part of the printed "
        "address, or the value of the environment variable GEODL_TOKEN.",
        "serve flowers/",
    ),
    Command(
        "run", "run:run", RESEARCH,
        "Run one incremental experiment: base classes first, then new classes phase by phase. If it is killed, the same command "
        "resumes; a complete run prints its result.",
        "run --preset digits --method lucir --distill geodesic",
    ),
    Command(
        "compare", "run:compare", RESEARCH,
        "Run several methods under one protocol, one after the other, and compare them in one table; with several seeds "
        "(--seed 1,2,3) by mean and standard deviation.",
        "compare finetune lucir lucir+geodesic --preset digits",
    ),
    Command(
        "sweep", "sweep:app", RESEARCH,
        "Run a grid or a search, several runs at a time: on this machine, on a Ray cluster or by SLURM. Complete runs are skipped; "
        "`geodl sweep status` shows the progress.",
        "sweep --preset digits --grid method=lucir,lucir+geodesic,icarl --grid seed=1,2,3",
    ),
    Command("methods", "installation:methods", RESEARCH, "List the methods, their papers and defaults.", "methods"),
    Command(
        "config show", "installation:show", RESEARCH,
        "Print every option with its value and origin: default, default of the method, preset, file, command line.",
        "config show --preset cifar100 --method bic",
    ),
    Command("config presets", "installation:show_presets", RESEARCH, "List the presets.", "config presets"),
    Command(
        "runs list", "runs:list_all", RESEARCH,
        "List the runs below a directory with their state and result.",
        "runs list",
    ),
    Command("runs show", "runs:show", RESEARCH, "Show the result of one run so far.", "runs show runs/NAME"),
    Command("runs rm", "runs:rm", RESEARCH, "Remove a run's directory.", "runs rm runs/NAME"),
    Command(
        "report", "report:report", OWN,
        "Write one self-contained HTML page about a model, or about one or several runs. Runs that differ only in their seed are "
        "averaged; published numbers of the same protocol are shown beside them.",
        "report flowers/",
    ),
    Command(
        "reproduce", "reproduce:reproduce", RESEARCH,
        "Run what a table or figure of the paper needs and write the results beside the published numbers: table1 to table4, init10, "
        "fig-phases, fig-classifiers, fig-cca, or all of them; or beyond (the closed form over given weights). Complete runs are skipped.",
        "reproduce table1 --length smoke --runs 1",
    ),
    Command("cache show", "runs:show_cache", ABOUT, "Show the location and size of the cache.", "cache show"),
    Command("cache clear", "runs:clear", ABOUT, "Remove all trained base phases and converted models.", "cache clear"),
    Command(
        "doctor", "installation:doctor", ABOUT,
        "Print what a bug report needs: versions, devices, threads, extras, data.",
        "doctor",
    ),
]  # fmt: skip

app = App(
    name="geodl",
    version=__version__,
    help="Teach an image classifier new classes without forgetting the old ones.\n\n"
    "Start with `geodl learn MODEL FOLDER` for your own images, or `geodl compare finetune lucir lucir+geodesic --preset digits` "
    "for an experiment; `geodl COMMAND --help` explains a command. "
    "Every command takes `--import FILE.py` for your own methods, classifiers and data sources.",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # main prints a line for it
)


def _list_runs() -> None:
    from geodl.cli.runs import list_all

    list_all()


def example_of(name: str) -> str:
    """Return the example that ends a command's help."""
    (example,) = [command.example for command in COMMANDS if command.name == name]
    return f"Example: `geodl {example}`"


def _register() -> None:
    parents = {name: App(name=name, help=text, group=g) for name, (g, text) in PARENTS.items()}
    parents["runs"].default(_list_runs)
    for parent in parents.values():
        app.command(parent)
    for command in COMMANDS:
        parent_name, _, name = command.name.rpartition(" ")
        parent, group = (parents[parent_name], ACTIONS) if parent_name else (app, command.group)
        options = {"help_epilogue": example_of(command.name)}
        if command.function.endswith(":app"):
            options = {}  # an App sets its epilogue itself
        function = f"geodl.cli.{command.function}"
        parent.command(function, name=name, help=command.text, group=group, **options)


_register()
app.register_install_completion_command(group=ABOUT)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; an error of the package is one line and exit code 2."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # libraries' warnings are for developers
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        with signals.handled(signals.quit_now, signal.SIGTERM):
            status = app(_with_imports(words), exit_on_error=False, print_error=False)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of the output has closed it
        sys.exit(0)
    except (CycloptsError, GeodlError, OSError, KeyboardInterrupt, signals.Terminated) as error:
        message, code = _explained(error)
        print(f"geodl: {printable(message)}", file=sys.stderr)
        sys.exit(code)
    sys.exit(status if isinstance(status, int) else 0)


def _explained(error: BaseException) -> tuple[str, int]:
    """Return the message and the exit code of an error."""
    match error:
        case UnusedCliTokensError():
            words = " ".join(error.unused_tokens or [])
            return f"{words}: too many arguments; see `geodl COMMAND --help`", 2
        case Interrupted():
            return str(error), signals.status()
        case GeodlError():
            return str(error), 2
        case KeyboardInterrupt():
            return "interrupted; completed work is kept", 130
        case signals.Terminated():
            return "terminated; completed work is kept", 143
        case OSError(filename=str() | bytes()):  # for example, the name is too long
            return f"{one_line(str(error.filename), 100)}: {error.strerror}", 2
    return one_line(error), 2


def _with_imports(arguments: Sequence[str]) -> list[str]:
    """Import what --import names, before the options of a command are declared; return the remaining arguments."""
    rest, names, words = list[str](), list[str](), iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name == "--import":
            names.append(value if equals else next(words, ""))
        else:
            rest.append(word)
    if names:  # importing the configuration takes a moment
        from geodl.config import import_parts

        import_parts(names)
    return rest
