"""Draw docs/steps.svg: flowers in, classes out, accuracy after each step. The flowers are drawn; the accuracies are those of docs/own-images.md."""

from pathlib import Path

STEPS = [  # new classes, known classes, leave-one-out accuracy in %, seconds
    (10, 10, 99.0, 6),
    (5, 15, 98.6, 5),
    (5, 20, 98.5, 7),
]
FLOWERS = [  # petals, length, width, color, heart
    [
        (14, 13, 3, "#ffffff", "#e0b000"),
        (4, 12, 8, "#d62839", "#222222"),
        (20, 14, 3, "#f2c300", "#7a4a16"),
    ],
    [(8, 13, 5, "#3f6fd8", "#1d2f6f"), (5, 13, 8, "#f06fa7", "#ffffff")],
    [(6, 13, 6, "#8d4fc4", "#f2c300"), (12, 13, 4, "#f28a1c", "#7a2d00")],
]
INK, SOFT, BLUE = "#333333", "#777777", "#1f5f8b"


def flower(
    x: float, y: float, petals: int, length: float, width: float, color: str, heart: str
) -> str:
    """Return one flower around (x, y)."""
    drawn = []
    for petal in range(petals):
        turn = 360 * petal / petals
        reach = length / 2 + 3
        shape = f'<ellipse cx="{x}" cy="{y - reach}" rx="{width}" ry="{length / 2}"'
        drawn.append(
            f'{shape} fill="{color}" stroke="#555" stroke-width=".5" transform="rotate({turn:.1f} {x} {y})"/>'
        )
    return "".join(drawn) + f'<circle cx="{x}" cy="{y}" r="5" fill="{heart}"/>'


def text(
    x: float, y: float, words: str, color: str = INK, size: int = 13, weight: int = 400
) -> str:
    """Return a line of text that begins at (x, y)."""
    return f'<text x="{x}" y="{y}" fill="{color}" font-size="{size}" font-weight="{weight}">{words}</text>'


def row(number: int) -> str:
    """Return one step: a folder of flowers, the command, the classes known, the accuracy as a bar."""
    new, known, accuracy, seconds = STEPS[number]
    y = 62 + 74 * number
    parts = [f'<rect x="14" y="{y - 28}" width="172" height="58" rx="7" fill="#8fb36b"/>']
    for i, kind in enumerate(FLOWERS[number]):
        parts.append(flower(45 + 55 * i, y + 1, *kind))
    parts += [
        text(206, y - 8, f"geodl learn model/ week{number + 1}/", BLUE, 14, 600),
        text(206, y + 14, f"{new} new classes in {seconds} seconds: {known} known", SOFT),
        f'<rect x="470" y="{y - 14}" width="200" height="22" rx="4" fill="#e4e9ee"/>',
        f'<rect x="470" y="{y - 14}" width="{2 * accuracy:.1f}" height="22" rx="4" fill="{BLUE}"/>',
        text(480, y + 2, f"{accuracy} % on all {known} classes", "#ffffff", 13, 600),
    ]
    return "".join(parts)


def main() -> None:
    """Write the figure."""
    height = 62 + 74 * len(STEPS) - 20
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 690 {height}" font-family="Helvetica, Arial, sans-serif">'
    ground = f'<rect width="690" height="{height}" rx="8" fill="#ffffff"/>'
    titles = (
        text(14, 20, "photographs in", SOFT)
        + text(206, 20, "one command", SOFT)
        + text(470, 20, "accuracy after each step", SOFT)
    )
    rows = "\n".join(row(number) for number in range(len(STEPS)))
    Path(__file__).with_name("steps.svg").write_text(
        f"{head}\n{ground}\n{titles}\n{rows}\n</svg>\n"
    )


if __name__ == "__main__":
    main()
