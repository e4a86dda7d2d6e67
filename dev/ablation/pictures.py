"""The pictures of a study, from its runs and the rows of stats.summarize; draw() draws all that
apply. Each is 9 inches wide, and the same bytes for the same data.

A value of the compared axis (a level) keeps its colour, line and marker in every picture; line and
marker tell it apart without the colour.
"""
import re

import numpy as np
from PIL import Image
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation

from ablation.stats import smooth
from ablation.study import COLLAPSED, DIVERGED, FINISHED

# Okabe and Ito's, with a brown for their yellow
COLORS = ["#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6000"]
LINES = ["-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (3, 1)), (0, (1, 3))]
MARKERS = ["o", "s", "^", "D", "v", "P", "*", "h", "<"]
# Of experts and shared experts, and of a latent ("kv_a_proj_with_mqa"), too.
MATRIX = re.compile(r"model\.layers\.(\d+)\.(self_attn|mlp)\.(?:\w+\.)?\w+_proj\w*\.weight")
NO_DIAGNOSTICS = "no diagnostics in the logs:\ntrain with a smaller --norms-every"


def nth_look(i):
    """Colour, line and marker of the i-th of several."""
    return {"color": COLORS[i % len(COLORS)], "linestyle": LINES[i % len(LINES)],
            "marker": MARKERS[i % len(MARKERS)]}


def look(study, level):
    return nth_look(study.axes[study.compare].index(level))


def printable(text):
    """Characters that do not print become spaces."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in str(text))


def short(text, width=26):
    """A name that fits into a picture and is not taken for mathematics."""
    text = " ".join(printable(text).split())
    text = text if len(text) <= width else f"{text[:width // 2]}…{text[1 - width // 2:]}"
    return text.replace("$", r"\$")


def panel_name(panel):
    return ", ".join(f"{axis} {value}" for axis, value in panel.items())


def signed(value):
    return f"{value:+.3f}".replace("-", "−")


def known(interval):
    return interval is not None and bool(np.isfinite(interval.mean))


def note(axes, text):
    """Words in place of data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9,
              bbox={"facecolor": "white", "edgecolor": "0.7"})


def runs_of(study, row):
    """The runs to show of a level, by seed; where none finished at any value of the tuned axis,
    those at the lowest; {} where the study has none."""
    lowest = min(study.axes[study.tune], key=float) if study.tune else None
    return row.runs or study.cell(row.panel, row.level, lowest)


def new_figure(height):
    return Figure(figsize=(9, height), dpi=110, layout="constrained")


def panels_of(count, most, height, **shared):
    """A figure with `count` axes in rows of at most `most`, as even as can be."""
    rows = -(-count // most)
    columns = -(-count // rows)
    figure = new_figure(0.7 + rows * height)
    grid = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for i, axes in enumerate(grid):
        axes.grid(alpha=0.3)
        axes.tick_params(labelsize=8, labelbottom=i + columns >= count)
        axes.set_visible(i < count)
    return figure, grid[:count], grid[:count:columns], grid[max(0, count - columns):count]


def legend(figure, handles, names):
    """One for the whole figure, above it."""
    names = [short(name) for name in names]
    columns = min(len(names), 120 // (10 + max(map(len, names))))
    figure.legend(handles, names, loc="outside upper center", ncols=columns, fontsize=9,
                  frameon=False, handlelength=4)


def level_handles(study):
    return [Line2D([], [], ms=6, **look(study, level)) for level in study.axes[study.compare]]


def save(figure, path):
    """As a PNG of 256 colours, a third of the bytes that all of them take, and nothing else in
    it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(256, method=Image.Quantize.FASTOCTREE,
                   dither=Image.Dither.NONE).save(path, "PNG", optimize=True)


def log_scale(axes, name):
    """A logarithmic axis, "x" or "y", whose ticks are plain numbers where it covers less than three
    decades."""
    axes.set(**{f"{name}scale": "log"})
    axis = getattr(axes, f"{name}axis")
    low, high = axis.get_view_interval()
    if high < 1000 * low:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10])
                               if high < 10 * low else LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.6g}"))
        axis.set_minor_locator(NullLocator())


# ------------------------------------------------------------------------------------------- losses

def over_seeds(series):
    """Steps that all the (steps, values) have, and an array [run][step] of values."""
    tables = [dict(zip(*one)) for one in series]
    steps = sorted(set.intersection(*map(set, tables))) if tables else []
    return steps, np.array([[table[step] for step in steps] for table in tables])


def loss_curve(run):
    steps, values = run.series("loss")
    return steps, smooth(values, max(1, len(values) // 50))


def draw_level(axes, runs, style):
    """One level's losses; returns those after the first 10 % of the steps, for the scale, and the
    last points of diverged runs."""
    line, seen, crosses = {"color": style["color"], "linestyle": style["linestyle"]}, [], []
    finished = [run for run in runs if run.status == FINISHED]
    steps, losses = over_seeds([loss_curve(run) for run in finished])
    if steps:
        axes.fill_between(steps, losses.min(0), losses.max(0), color=style["color"], alpha=0.2,
                          lw=0)
        axes.plot(steps, losses.mean(0), lw=1.5, **line)
        seen += list(losses[:, np.array(steps) >= 0.1 * steps[-1]].flat)
    steps, losses = over_seeds([run.series("val_loss") for run in finished])
    if steps:
        every = max(1, len(steps) // 8)
        axes.plot(steps[::-every], losses.mean(0)[::-every], style["marker"], color=style["color"],
                  ms=6.5, mfc="none", mew=1.5, zorder=3)
        seen += list(losses.mean(0)[::-every])[:-1]
    for run in runs:
        if run.status != FINISHED and run.series("loss")[0]:
            steps, losses = loss_curve(run)
            axes.plot(steps, losses, lw=0.7, **line)
            crosses += [(steps[-1], losses[-1], style["color"])] if run.status == DIVERGED else []
            seen += losses[-1:] if not finished else []
    return seen, crosses


def draw_losses(study, rows, path):
    """Losses in nats per token (logarithmic) against the step, a panel each: thick the mean over
    the finished seeds of the training loss, smoothed over 2 % of the run, in a band from the lowest
    to the highest seed; markers their mean validation loss; thin the runs that collapsed or did not
    finish, with a cross where one diverged."""
    panels = study.panels()
    figure, grid, left, bottom = panels_of(len(panels), 3, 3.6 if len(panels) > 1 else 4.3,
                                           sharex=True, sharey=True)
    seen, crosses = [], []
    for axes, panel in zip(grid, panels):
        axes.set_title(short(panel_name(panel), 44), fontsize=10)
        drawn = [draw_level(axes, runs_of(study, row).values(), look(study, row.level))
                 for row in rows if row.panel == panel]
        seen += [loss for losses, _ in drawn for loss in losses]
        crosses += [(axes, *cross) for _, found in drawn for cross in found]
        if not axes.lines:
            note(axes, "no run has logged a step")
    if seen:
        grid[0].set_ylim(0.97 * min(seen), 1.03 * max(seen))
        draw_floors(study, rows, grid)
        log_scale(grid[0], "y")
    else:
        grid[0].set(xticks=[], yticks=[])
    for axes, step, loss, color in crosses:
        axes.plot(step, min(loss, axes.get_ylim()[1]), "x", color=color, ms=8, mew=2, clip_on=False,
                  zorder=4)
    for axes in left:
        axes.set_ylabel("loss, nats per token", fontsize=9)
    for axes in bottom:
        axes.set_xlabel(f"step ({study.tokens_per_step:,} tokens each)"
                        if study.tokens_per_step else "step", fontsize=9)
    marks = [Line2D([], [], color="black", marker="x", ms=8, mew=2, ls="none")] if crosses else []
    legend(figure, level_handles(study) + marks,
           study.axes[study.compare] + ["diverged"] * len(marks))
    save(figure, path)


def draw_floors(study, rows, grid):
    """The entropy of the validation data where it is known: a line, or only words where that would
    leave little room for the curves."""
    for axes, panel in zip(grid, study.panels()):
        floors = [floor for row in rows if row.panel == panel
                  for run in runs_of(study, row).values() if (floor := run.floor()) is not None]
        low = grid[0].get_ylim()[0]
        if floors and floors[0] > 0.6 * low:
            grid[0].set_ylim(bottom=min(low, 0.95 * floors[0]))
            axes.axhline(floors[0], color="black", ls=":", lw=1)
            axes.text(0.01, floors[0], f"entropy of the data, {floors[0]:.3f}",
                      transform=axes.get_yaxis_transform(), fontsize=8, va="bottom")
        elif floors:
            axes.text(0.98, 0.97, f"entropy of the data, {floors[0]:.3f}, far below",
                      transform=axes.transAxes, fontsize=8, ha="right", va="top")


def lost_runs(row):
    """How many of a row's runs are in no mean, and why."""
    left = row.total - row.finished - row.collapsed - row.diverged
    return [(count, what) for count, what in ((row.collapsed, "collapsed"),
                                              (row.diverged, "diverged"), (left, "not finished"))
            if count]


def lost_text(row):
    return ", ".join(f"{count} of {row.total} {what}" for count, what in lost_runs(row))


def level_name(study, row):
    """The level, its rate, and what became of the runs that are not in its mean."""
    return (short(row.level) + (f", {study.tune} {row.rate}" if row.rate is not None else "")
            + (f"\n{lost_text(row)}" if lost_runs(row) else ""))


def interval_text(interval):
    return signed(interval.mean) + (f" ({signed(interval.low)} to {signed(interval.high)})"
                                    if np.isfinite(interval.low) else "")


def difference_text(row):
    return ("baseline" if row.difference is None
            else interval_text(row.difference) if known(row.difference)
            else "no pairs")


def draw_interval(axes, interval, y, style):
    ends = [[interval.mean - interval.low],
            [interval.high - interval.mean]] if np.isfinite(interval.low) else None
    axes.errorbar(interval.mean, y, xerr=ends, fmt=style["marker"], color=style["color"], ms=7,
                  lw=1.5, capsize=3)


def draw_difference(axes, interval, y, style, limit):
    """A difference farther away than the limit is an arrow at the edge."""
    if abs(interval.mean) <= limit:
        draw_interval(axes, interval, y, style)
    else:
        axes.plot(np.copysign(limit, interval.mean), y, "<" if interval.mean < 0 else ">",
                  color=style["color"], ms=9)


def draw_finals(study, rows, path):
    """Final validation losses in nats per token, a line of the picture for each level: on the left
    every finished seed (small, hollow) and their mean with its 95 % interval; on the right the
    difference to the baseline over pairs of the same seed, with its 95 % interval (an arrow: more
    than ten times as far as most)."""
    panels = study.panels()
    figure = new_figure(0.5 + len(panels) * (0.75 + 0.3 * len(study.axes[study.compare])))
    grid = figure.subplots(len(panels), 2, squeeze=False, sharex="col")
    reach = sorted(np.nanmax(np.abs(row.difference[:3])) for row in rows if known(row.difference))
    limit = 1.1 * min(reach[-1], 10 * reach[(len(reach) - 1) // 2]) if reach else 1
    for (left, right), panel in zip(grid, panels):
        here = [row for row in rows if row.panel == panel]
        for y, row in enumerate(here):
            style = look(study, row.level)
            losses = [loss for run in row.runs.values() if (loss := run.final_loss()) is not None]
            left.plot(losses, [y + 0.27] * len(losses), style["marker"], ms=4, mfc="none",
                      color=style["color"])
            if known(row.loss):
                draw_interval(left, row.loss, y, style)
            if known(row.difference):
                draw_difference(right, row.difference, y, style, limit)
        left.set_title(short(panel_name(panel), 30), fontsize=10)
        left.set_yticks(range(len(here)), [level_name(study, row) for row in here])
        right.axvline(0, color="black", lw=1)
        right.set_title("← better", loc="left", fontsize=9)
        right.set_title("worse →", loc="right", fontsize=9)
        right.set_xlim(-1.05 * limit or -1, 1.05 * limit or 1)
        right.yaxis.tick_right()
        right.set_yticks(range(len(here)), [difference_text(row) for row in here])
        if not any(known(row.loss) for row in here):
            note(left, "no run has finished\nwith a validation loss")
        for axes in (left, right):
            axes.set_ylim(len(here) - 0.4, -0.6)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.3)
    if not any(known(row.loss) for row in rows):
        grid[0][0].set_xticks([])
    if not reach:
        grid[0][1].set_xticks([0])
    grid[-1][0].set_xlabel("final loss, nats per token", fontsize=9)
    grid[-1][1].set_xlabel("difference to the baseline, nats per token", fontsize=9)
    save(figure, path)


def draw_rate_curve(axes, study, row, beside):
    """One level's curve; returns whether there was anything to draw it from."""
    style = look(study, row.level)
    cells = {float(rate): study.cell(row.panel, row.level, rate).values()
             for rate in study.axes[study.tune]}
    losses = {rate: [loss for run in runs if (loss := run.final_loss()) is not None]
              for rate, runs in cells.items()}
    means = {rate: np.mean(found) for rate, found in losses.items() if found}
    lost = [rate for rate, runs in cells.items()
            if any(run.status in (COLLAPSED, DIVERGED) for run in runs)]
    axes.plot(list(means), list(means.values()), lw=1.5, ms=6, **style)
    if row.rate is not None:
        axes.plot(float(row.rate), means[float(row.rate)], "o", ms=13, mfc="none",
                  color=style["color"])
    top = axes.get_xaxis_transform() + beside
    axes.plot(lost, [1] * len(lost), style["marker"], transform=top, ms=6, mfc="white",
              color=style["color"], clip_on=False, in_layout=False)
    return bool(means)


def draw_rates(study, rows, path):
    """Final validation loss in nats per token, the mean over the finished seeds, against the tuned
    value (both logarithmic), a panel each; a ring around the value that was chosen; hollow marks at
    the top edge, side by side: values at which a seed collapsed or diverged."""
    panels, levels, rates = (study.panels(), study.axes[study.compare],
                             {float(rate): rate for rate in study.axes[study.tune]})
    figure, grid, left, bottom = panels_of(len(panels), 3, 3.4 if len(panels) > 1 else 4.2,
                                           sharex=True, sharey=True)
    drawn = []
    for axes, panel in zip(grid, panels):
        axes.set_title(short(panel_name(panel), 44), fontsize=10, pad=10)
        besides = [ScaledTranslation(7 / 72 * (i - (len(levels) - 1) / 2), 0,
                                     figure.dpi_scale_trans) for i in range(len(levels))]
        found = [draw_rate_curve(axes, study, row, besides[levels.index(row.level)])
                 for row in rows if row.panel == panel]
        if not any(found):
            note(axes, "no run has finished\nwith a validation loss")
        drawn += found
    low, high = min(rates), max(rates)
    margin, named = max(1.2, (high / low) ** 0.2), []
    for rate in sorted(rates):
        named += [rate] if not named or np.log(rate / named[-1]) > 0.15 * np.log(high / low) else []
    grid[0].set_xlim(low / margin, high * margin)
    log_scale(grid[0], "x")
    grid[0].set_xticks(named, [rates[rate] for rate in named])
    grid[0].xaxis.set_minor_locator(NullLocator())
    if any(drawn):
        log_scale(grid[0], "y")
    else:
        grid[0].set_yticks([])
    for axes in left:
        axes.set_ylabel("final validation loss, nats per token", fontsize=9)
    for axes in bottom:
        axes.set_xlabel(study.tune, fontsize=9)
    hollow = ([Line2D([], [], color="black", marker="o", mfc="white", ls="none")]
              if any(run.status in (COLLAPSED, DIVERGED) for run in study.runs) else [])
    legend(figure, level_handles(study) + hollow, levels + ["collapsed or diverged"] * len(hollow))
    save(figure, path)


# ------------------------------------------------------------------------------------------- layers

def diagnostics(log):
    return [line for line in log if line.get("grad_norms")]


def numbers(values):
    return np.array(values, float)                             # None: NaN


def by_layer(table, blocks):
    """The values of the matrices of these blocks (tensor name -> value), as an array for each
    layer."""
    found = {}
    for name, value in table.items():
        if (match := MATRIX.fullmatch(name)) and match[2] in blocks:
            found.setdefault(int(match[1]), []).append(value)
    return [numbers(found[layer]) for layer in sorted(found)]


def draw_layer_norms(axes, log):
    """The gradient norm of the FFN's matrices (logarithmic) against the step, one line per layer,
    dark the first, light the last; first, middle and last are named."""
    lines = diagnostics(log)
    norms = np.array([[np.sqrt(np.sum(matrices ** 2))
                       for matrices in by_layer(line["grad_norms"], ("mlp",))] for line in lines])
    layers = norms.shape[1]
    named = {layers // 2: "--", layers - 1: ":", 0: "-"}
    for layer in range(layers):
        axes.plot([line["step"] for line in lines], norms[:, layer], named.get(layer, "-"),
                  color=colormaps["viridis"](0.9 * layer / max(1, layers - 1)),
                  lw=2 if layer in named else 0.7,
                  marker="." if layer in named and len(lines) < 30 else None,
                  label=f"layer {layer}" if layer in named else None)
    log_scale(axes, "y")


def deepest(study, rows):
    """The panel with the most layers; of several the last."""
    def depth(panel):
        configs = [run.config for row in rows if row.panel == panel
                   for run in runs_of(study, row).values() if run.config]
        return max((int(config["flags"]["layers"]) for config in configs), default=0)
    return max(reversed(study.panels()), key=depth)


def draw_norms(study, rows, path):
    """The gradient norm of the FFN's matrices, layer by layer (draw_layer_norms), of each level's
    first seed; all panels where that is at most twelve plots, else the deepest."""
    levels, panels = study.axes[study.compare], study.panels()
    every = len(levels) <= 4 and len(levels) * len(panels) <= 12
    rows = [row for row in rows if every or row.panel == deepest(study, rows)]
    figure, grid, left, bottom = panels_of(len(rows), len(levels) if every else 4, 2.5, sharex=True,
                                           sharey=True)
    for axes, row in zip(grid, rows):
        axes.set_title("\n".join(short(text, 24) for text in (row.level, panel_name(row.panel))
                                 if text), fontsize=9)
        logs = [run.log for run in runs_of(study, row).values() if diagnostics(run.log)]
        if logs:
            draw_layer_norms(axes, logs[0])
        else:
            note(axes, NO_DIAGNOSTICS)
    for axes in left:
        axes.set_ylabel("FFN gradient norm", fontsize=9)
    for axes in bottom:
        axes.set_xlabel("step", fontsize=9)
    handles = max((axes.get_legend_handles_labels()[0] for axes in grid), key=len)
    if handles:
        legend(figure, handles, ["first layer", "middle layer", "last layer"]
               if len(handles) == 3 else ["first layer", "last layer"][:len(handles)])
    else:
        grid[0].set(xticks=[], yticks=[])
    save(figure, path)


LAYERS = {"residual_rms": ("residual stream", "root mean square", "log"),
          "attn_ratio": ("attention branch", "rms / rms of its skip", "log"),
          "ffn_ratio": ("ffn branch", "rms / rms of its skip", "log"),
          "attn_logit_max": ("attention logits", "largest", "linear"),
          "update_ratios": ("last update of the matrices", "norm / norm of the weights", "log")}


def draw_layers(study, rows, path):
    """The deepest panel at the end of training, against the layer's number: root mean square of the
    residual stream, root mean square of each branch over that of its skip, largest attention logit,
    norm of the last update over that of the weights (median over the layer's matrices). One line
    per level: the median over its finished runs."""
    panel = deepest(study, rows)
    figure = new_figure(5.6)
    *grid, beside = figure.subplots(2, 3).flat
    for axes, (key, (title, unit, scale)) in zip(grid, LAYERS.items()):
        for row in (row for row in rows if row.panel == panel):
            last = [lines[-1][key] for run in row.runs.values()
                    if run.status == FINISHED and (lines := diagnostics(run.log))]
            if key == "update_ratios":
                last = [[np.median(matrices) for matrices in by_layer(table, ("self_attn", "mlp"))]
                        for table in last]
            if last:
                values = np.median([numbers(layers) for layers in last], axis=0)
                axes.plot(range(len(values)), values, lw=1.5, ms=5,
                          markevery=max(1, len(values) // 8), **look(study, row.level))
        axes.set_title(title, fontsize=10)
        axes.set_ylabel(unit, fontsize=9)
        axes.set_xlabel("layer", fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if not axes.lines:
            note(axes, NO_DIAGNOSTICS)
            axes.set(xticks=[], yticks=[])
        elif scale == "log":
            log_scale(axes, "y")
    beside.set_axis_off()
    beside.legend(level_handles(study), [short(level) for level in study.axes[study.compare]],
                  loc="center", fontsize=9, frameon=False, handlelength=4)
    save(figure, path)


CAPTIONS = {
    "loss.png": "Thick: training loss, mean over the finished seeds, smoothed over 2 % of the run, "
                "in a band from the lowest to the highest seed; markers: validation loss. Thin: a "
                "run that collapsed or did not finish; a cross where it diverged. The first 10 % "
                "of the steps may lie above the picture.",
    "final.png": "Left: validation loss at the end, each seed (small) and the mean with its 95 % "
                 "interval. Right: difference to the baseline over pairs of the same seed, with "
                 "its 95 % interval: where it reaches over the zero line, the two cannot be told "
                 "apart. An arrow: far outside of the picture.",
    "rates.png": "Mean over the finished seeds; a ring around the value that the other pictures "
                 "show. Hollow, at the top edge: at least one seed collapsed or diverged.",
    "norms.png": "Gradient norm of the FFN's matrices, a line for each layer, dark the first, "
                 "light the last; one seed. Lines that stay together: every layer learns. Lines "
                 "that fan out downwards: the gradient vanishes on its way to those layers.",
    "layers.png": "What each layer does at the end of training; the median over the "
                  "finished seeds.",
}


def draw(study, rows, folder):
    """Draws the pictures into the folder; returns (file name, title, caption) of each."""
    deep = panel_name(deepest(study, rows))
    pictures = [("loss.png", "Loss", draw_losses), ("final.png", "Final loss", draw_finals)]
    pictures += [("rates.png", f"Final loss by {study.tune}",
                  draw_rates)] * (study.tune is not None)
    pictures += [("norms.png", "Gradients by layer", draw_norms),
                 ("layers.png", "Layers at the end" + (f", {deep}" if deep else ""), draw_layers)]
    for name, _, picture in pictures:
        picture(study, rows, f"{folder}/{name}")
    return [(name, title, CAPTIONS[name]) for name, title, _ in pictures]
