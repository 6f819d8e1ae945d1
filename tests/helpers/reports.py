"""Small runs for reports, among them one whose classes have evil names; and what any page must be."""

import functools
import html.parser
import shutil
from dataclasses import replace

from tests.helpers import tiny
from tests.helpers.directories import cut

from geodl.bench.experiment import run_config
from geodl.bench.report import page
from geodl.bench.report.results import Setting, read_run, read_settings

NAMES = (
    "Katze",
    "小猫",
    "__dunder",
    "$x^2$ </script>&",
    'ёж "quoted"',
    "a very long class name that goes on",
)
# What class names must not do: end or open elements, comments and data, run, turn the writing round, fail to be encoded.
EVIL = (
    "<!--<script>",
    "<!-- comment",
    "</script><script>window.evil = 1</script>",
    "</svg><script>window.evil = 1</script>",
    "</style></title></textarea>",
    "<img src=x onerror='window.evil = 1'>",
    '" onmouseover="window.evil = 1',
    "' autofocus onfocus='window.evil = 1",
    "]]><![CDATA[",
    "&lt;b&gt;&amp;",
    "{{ 7 * 7 }}",
    "{% include 'page.css' %}",
    "javascript:window.evil = 1",
    "__proto__",
    "#1c2127 url(#x)",
    r"$x^2$ \alpha %s {0}",
    "\u202egnp.exe",
    "\u2066one\u2069 \u2028two",
    "\x1b[31mred\x1b[0m\x9b",
    "bell\x07 null\x00",
    "line\nbreak\ttab\r",
    "\ud800 half",
    "\ufffe\uffff",
    "عربي",
)


@functools.cache
def make_runs(root):
    """Make tiny runs, once for all tests."""
    root.mkdir()

    def go(name, names=NAMES, train=12, test=4, **options):
        data = replace(tiny.dataset(len(names), train, test), classes=tuple(names))
        given = {"method": "lucir", "epochs": 1, "lr": 0.1, "scale": 10.0, "base": 3, "phases": 3}
        run_config(tiny.config(ame=True, **given | options), out=root / name, data=data)

    go("geo-1", distill="geodesic", seed=1)
    go("geo-2", distill="geodesic", seed=2)
    go("cos")
    go("none", method="finetune", exemplars=0, analysis=False)
    go("base", method="finetune", base=None, phases=0)
    go("own", data="folder", base=None, phases=0)
    go("evil", [f"class-{i}" for i in range(len(EVIL))], 3, 2, base=4, phases=5)
    hundred = [f"class {i}" for i in range(100)]
    go("cifar", hundred, 3, 2, data="cifar100", base=50, phases=5, exemplars=20)
    shutil.copytree(root / "geo-1", root / "partial")
    cut(root / "partial", 3)
    shutil.copytree(root / "geo-1", root / "nothing")
    cut(root / "nothing", 0)
    return root


@functools.cache
def render(runs, *names, **options):
    return page.render(read_settings([runs / name for name in names]), **options)


def renamed(value, names):
    """Give classes other names, wherever they are in what was read of a run."""
    if isinstance(value, dict):
        return {names.get(key, key): renamed(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [renamed(each, names) for each in value]
    return names.get(value, value) if isinstance(value, str) else value


@functools.cache
def evil_page(runs):
    """Give the page of a run whose classes have evil names, whoever let them in."""
    run = read_run(runs / "evil")
    names = {f"class-{i}": name for i, name in enumerate(EVIL)}
    run = replace(
        run, metrics=renamed(run.metrics, names), environment={"<!--<script>": "\u202e</dl>"}
    )
    one = Setting("<!--<script>\u202e", (run,))
    return page.render([one]), page.render([one, replace(one, label="two")])


class Checker(html.parser.HTMLParser):
    """Collects ids, text and addresses, and notices elements that are not closed in order."""

    VOID = frozenset({"meta", "img", "input", "br", "link"})

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.addresses, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value)
            if name in {"src", "href", "xlink:href", "srcset", "data", "action"}:
                self.addresses.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in {"script", "style"}:
            self.words.append(data)
