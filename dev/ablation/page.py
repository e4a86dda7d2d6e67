"""The page of a study: one HTML file that holds everything, the pictures too, runs no script and
asks nothing of the network."""
import base64
import html
import pathlib
import shlex

from ablation.pictures import (difference_text, known, lost_runs, lost_text, panel_name, printable,
                               signed)
from ablation.study import DIVERGED, ENDED, FAILED, KILLED, WAITING

STYLE = """
body { max-width: 62rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  color: #111; background: #fff; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.2; }
h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-top: 1px solid #bbb; padding-top: 1rem; }
p, figcaption, dd, li { max-width: 46rem; }
pre, code { font: .85rem/1.4 ui-monospace, monospace; }
pre { background: #f4f4f4; padding: .6rem; white-space: pre-wrap; }
summary { cursor: pointer; }
dt { font-weight: bold; margin-top: .5rem; }
dd { margin-left: 1.5rem; }
table { border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .25rem .9rem .25rem 0;
  border-bottom: 1px solid #ddd; white-space: nowrap; }
td { font-variant-numeric: tabular-nums; }
tbody th { white-space: normal; min-width: 6rem; max-width: 16rem; font-weight: normal; }
tbody th.panel { max-width: none; padding-top: 1rem; font-weight: bold; }
figure { margin: 1.5rem 0; }
img { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
.wide:focus img { min-width: 58rem; }
@media screen and (max-width: 58rem) {
  figcaption::after { content: " Tap the picture to enlarge it."; }
}
.warning { border-left: .3rem solid #111; padding-left: .8rem; white-space: pre-line; }
@media print {
  body { max-width: none; padding: 0; }
  img { min-width: 0; }
  th, td { white-space: normal; }
  figure, tr { break-inside: avoid; }
  pre { background: none; border: 1px solid #bbb; }
}
"""

HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
"""

DEFINITIONS = {
    "Final loss": "nats per token on the validation data, at the end of a run: the mean over the "
                  "seeds that finished; ± half of its 95 % interval.",
    "Interval": "Student's 95 % interval of a mean, from the scatter of the seeds alone: it does "
                "not know other data, sizes or budgets. Each interval is 95 % by itself: of "
                "twenty, one misses, on average.",
    "Difference": "taken seed by seed: runs with the same seed have the same data in the same "
                  "order and the same initial values of all weights they have in common, and what "
                  "that does to both cancels. Where the interval contains 0, these runs cannot "
                  "tell the two apart, which does not make them equal.",
    "Steps saved": "by which part of its steps a run reaches the same training loss earlier than "
                   "the baseline's run of the same seed; negative: later. With a learning rate "
                   "that falls this understates: the better run passes that loss while its rate is "
                   "still high.",
    "Seeds needed": "pairs of runs with which a difference of the size found would show itself "
                    "four times in five; a rough guess where there are few.",
    "Collapsed": "the run ended no better than a model that knows how often each token occurs and "
                 "nothing else (within 2 % of that entropy). Its loss is in no mean.",
    "Diverged": "the trainer stopped: many steps in a row were not finite, or the last ones "
                "were not.",
}


def escaped(text):
    """Text as HTML, without what HTML may not hold."""
    return html.escape(printable(text))


def listed(words, last):
    """A, B and C."""
    return f" {last} ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def axis_values(axis, values, last):
    text = listed(values, last)
    return text if axis == "mode" else f"{text} layers" if axis == "layers" else f"{axis} {text}"


def question(study):
    """The study's question: "Does SPAN train better than PRE at 6 and 24 layers?"."""
    levels = [axis_values(study.compare, [level], "") for level in study.axes[study.compare]]
    asked = f"Which trains best: {listed(levels, 'or')}"
    if len(levels) == 1:
        asked = f"How does {levels[0]} train"
    elif len(levels) == 2:
        asked = f"Does {levels[1]} train better than {levels[0]}"
    others = [axis for axis in study.axes if axis not in (study.compare, study.tune, "seed")]
    panels = [axis_values(axis, study.axes[axis], "and") for axis in others if axis != "mode"]
    asked += f" at {', '.join(panels)}" if panels else ""
    return asked + (f" under {listed(study.axes['mode'], 'and')}" if "mode" in others else "") + "?"


# --------------------------------------------------------------------------------- numbers in words

def loss_text(interval):
    if not known(interval):
        return "–"
    return f"{interval.mean:.4f}" + (f" ± {interval.high - interval.mean:.4f}"
                                     if interval.n > 1 else "")


def saved_text(interval):
    if not known(interval):
        return "–"
    ends = f" ({100 * interval.low:.0f} to {100 * interval.high:.0f})" if interval.n > 1 else ""
    return f"{100 * interval.mean:.0f} %{ends}".replace("-", "−")


def runs_text(row):
    return ", ".join([f"{row.finished} finished"]
                     + [f"{count} {what}" for count, what in lost_runs(row)])


def verdict(row, baseline):
    """One row: its level against the baseline, as a part of a sentence."""
    found, level = row.difference, row.level
    if row.finished == 0:
        return f"{level} has no finished run ({lost_text(row)})"
    if not known(found):
        return (f"{level} and {baseline} have no two finished runs of the same seed with a "
                "validation loss")
    lost = "".join(f", and {count} of {row.total} runs {what}" for count, what in lost_runs(row))
    distance = (f"{level} ends {abs(found.mean):.3f} nats {'below' if found.mean < 0 else 'above'} "
                f"{baseline}")
    if found.n < 2:
        return f"{distance} (one seed: no interval)" + lost
    if found.low <= 0 <= found.high:
        return (f"{level} and {baseline} cannot be told apart ({signed(found.mean)}, 95 % interval "
                f"{signed(found.low)} to {signed(found.high)}, {found.n} pairs of seeds)") + lost
    low, high = sorted([abs(found.low), abs(found.high)])
    return f"{distance} (95 % interval {low:.3f} to {high:.3f}, {found.n} pairs of seeds)" + lost


def answer(rows):
    """The sentence of one panel."""
    base = next(row for row in rows if row.difference is None)
    alone = ([verdict(base, "")] if base.finished == 0
             else [f"{base.level} ends at {loss_text(base.loss)} nats per token"] if len(rows) == 1
             else [])
    said = alone + [verdict(row, base.level) for row in rows if row is not base]
    for word in ("lowest", "highest"):
        levels = [row.level for row in rows if row.edge and row.edge[0] == word]
        said += [f"the best learning rate of {listed(levels, 'and')} is the {word} tried, "
                 "so a better one may lie beyond"] * bool(levels)
    return "; ".join(said) + "."


# ---------------------------------------------------------------------------- the parts of the page

def panels_of(study, rows):
    return [(panel_name(panel), [row for row in rows if row.panel == panel])
            for panel in study.panels()]


def answers(study, rows):
    for name, here in panels_of(study, rows):
        yield "<p>" + (f"<strong>{escaped(name)}:</strong> "
                       if name else "") + escaped(answer(here)) + "</p>"
    counts = [f"{count} {status}" + " or in work" * (status == WAITING)
              for status in (*ENDED, FAILED, KILLED, WAITING)
              if (count := sum(run.status == status for run in study.runs))]
    seconds = sum(run.seconds or 0 for run in study.runs)
    time = f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"
    best = f" Each {study.compare} at its best {study.tune}." if study.tune else ""
    text = f"{len(study.runs)} runs: " + ", ".join(counts) + f"; {time} of training." + best
    yield f"<p>{escaped(text)}</p>"


def table(study, rows):
    base = next(row.level for row in rows if row.difference is None)
    head = ([study.compare] + [f"best {study.tune}"] * bool(study.tune)
            + ["runs", "final loss", f"difference to {base} (95 %)", "steps saved", "seeds needed"])
    yield '<div class="wide"><table>'
    yield "<thead><tr>" + "".join(f'<th scope="col">{escaped(text)}</th>'
                                  for text in head) + "</tr></thead>"
    for name, here in panels_of(study, rows):
        yield "<tbody>" + ('<tr><th class="panel" scope="rowgroup" '
                           f'colspan="{len(head)}">{escaped(name)}</th></tr>' if name else "")
        for row in here:
            cells = ([row.rate or "–"] * bool(study.tune)
                     + [runs_text(row), loss_text(row.loss), difference_text(row),
                        saved_text(row.saved), row.seeds_needed or "–"])
            yield (f'<tr><th scope="row">{escaped(row.level)}</th>'
                   + "".join(f"<td>{escaped(text)}</td>" for text in cells) + "</tr>")
        yield "</tbody>"
    yield "</table></div>"


def figure(folder, name, title, caption):
    data = base64.b64encode((folder / name).read_bytes()).decode()
    image = f'<img src="data:image/png;base64,{data}" alt="{escaped(title)}">'
    return (f'<figure><div class="wide" tabindex="0">{image}</div>\n'
            f"<figcaption><strong>{escaped(title)}.</strong> "
            f"{escaped(caption)}</figcaption></figure>")


def failures(study):
    for run in (run for run in study.runs if run.status in (DIVERGED, FAILED, KILLED)):
        steps, tail = run.series("loss")[0], "\n".join(run.tail()) or "it printed nothing"
        last = f"last finite loss at step {steps[-1]}" if steps else "no step"
        summary = f"{run.name}: {run.status}, {last}, exit status {run.exit}"
        yield (f"<details{' open' * (run.status == FAILED)}><summary>{escaped(summary)}</summary>"
               f"<pre>{escaped(tail)}</pre></details>")


def definition_list(table):
    return "<dl>" + "".join(f"<dt>{escaped(what)}</dt><dd>{escaped(text)}</dd>"
                            for what, text in table.items()) + "</dl>"


def write_page(study, rows, warnings, pictures, path):
    """pictures: (file name, title, caption) of files beside the page, as of pictures.draw;
    warnings: sentences."""
    path, title = pathlib.Path(path), escaped(question(study))
    parts = [f"<h1>{title}</h1>", *answers(study, rows)]
    parts += [f'<p class="warning">{escaped(text)}</p>' for text in warnings + study.notes]
    parts += ["<h2>Table</h2>", *table(study, rows)]
    parts += ["<h2>Pictures</h2>"] + [figure(path.parent, *picture) for picture in pictures]
    lost = list(failures(study))
    parts += ["<h2>Runs that did not finish</h2>"] * bool(lost) + lost
    flags = " ".join(f"--{name} {value}" for name, value in study.flags.items())
    parts += (["<h2>Commands</h2>", f"<pre>{escaped(study.command)}</pre>"]
              + [f"<p>All runs: <code>{escaped(flags)}</code></p>"] * bool(flags))
    commands = "\n".join(shlex.join(run.command) for run in study.runs)
    parts += ["<details><summary>The command of each run</summary>"
              f"<pre>{escaped(commands)}</pre></details>"]
    parts += (["<h2>Machine</h2>", definition_list(study.machine)] * bool(study.machine)
              + ["<h2>What the words mean</h2>", definition_list(DEFINITIONS)])
    path.write_text(HEAD.format(title=title, style=STYLE) + "\n".join(parts)
                    + "\n</main>\n</body>\n</html>\n", encoding="utf-8")
