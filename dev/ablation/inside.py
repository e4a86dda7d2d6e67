"""Pictures of models from inside, arms side by side: the numbers of probe.json (dev/probe.py), and
the gradient norms in the logs.

An arm is a label, its look (colour, line, marker), and the probes or logs of its runs, one for each
seed. Lines are means over the runs, bands their 95 % intervals, of logarithms on a logarithmic
scale. The runs' own values set the limits of a picture, so a wide band may leave it.
"""
import dataclasses

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from ablation.pictures import (deepest, diagnostics, draw_interval, legend, log_scale, look,
                               new_figure, note, nth_look, numbers, panel_name, panels_of, runs_of,
                               save, short)
from ablation.stats import mean_interval

GROUPS = {
    "q, k, v": ("q_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    "attention out": ("o_proj",),
    "ffn in": ("gate_proj", "up_proj"),
    "ffn out": ("down_proj",),
}

SITES = {"hidden": "input of down", "up": "output of up"}


@dataclasses.dataclass
class Arm:
    label: str
    look: dict
    found: list                              # of each run: its probe.json, or its log


def arms_of_probes(labels, probes):
    """Each probe an arm of its own."""
    return [Arm(str(label), nth_look(i), [probe])
            for i, (label, probe) in enumerate(zip(labels, probes))]


def arms_of(study, rows, what):
    """The levels of the deepest panel, with what(run) of each run that has it."""
    panel = deepest(study, rows)

    def arm(row):
        found = [what(run) for run in runs_of(study, row).values()]
        return Arm(row.level, look(study, row.level), [one for one in found if one])

    return [arm(row) for row in rows if row.panel == panel]


# --------------------------------------------------------------------------------- means over runs

def pick(found, path):
    for key in path:
        found = found[key]
    return found


def over_runs(runs):
    """Mean, low and high ends over the runs of an array [run][x]; ends are NaN of one run."""
    return np.array([list(mean_interval(list(column)))[:3] for column in runs.T]).reshape(-1, 3).T


def draw_arms(axes, arms, path, logarithmic=False, first=0, **more):
    """A line for each arm, from x = first on, of a list in its runs' probe.json. The limits are
    those of the runs' own values. A logarithmic scale leaves out values that are not positive."""
    tables = [np.array([numbers(pick(one, path)) for one in arm.found]) for arm in arms]
    if logarithmic:
        tables = [np.log(np.where(table > 0, table, np.nan)) for table in tables]
        axes.set_yscale("log")
    plain = np.exp if logarithmic else np.array
    bands = []
    for arm, table in zip(arms, tables):
        if not np.any(np.isfinite(table)):
            continue
        mean, low, high = over_runs(table)
        x = np.arange(first, first + len(mean))
        line = {"lw": 1.5, "ms": 4, "markevery": max(1, len(mean) // 8)} | arm.look | more
        axes.plot(x, plain(mean), **line)
        axes.plot(x, plain(table).T, ls="none")
        bands.append((x, plain(low), plain(high), arm.look["color"]))
    ends = axes.get_ylim()
    for x, low, high, color in bands:
        axes.fill_between(x, low, high, color=color, alpha=0.15, lw=0)
    axes.set_ylim(ends)


def finish(figure, grid, arms, path):
    for axes in grid:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(labelsize=8)
        axes.title.set_fontsize(10)
        axes.grid(alpha=0.3)
        if not axes.lines:
            note(axes, "nothing here")
            axes.set(xticks=[], yticks=[])
        elif axes.get_yscale() == "log":
            log_scale(axes, "y")
    legend(figure, [Line2D([], [], ms=6, **arm.look) for arm in arms], [arm.label for arm in arms])
    save(figure, path)


# --------------------------------------------------------------------------------------- of probes

def draw_similarity(arms, path):
    """Heat maps, one for each arm: cosine of the streams that leave two blocks, mean over tokens
    and runs."""
    def mean(found):
        return np.nanmean([[numbers(row) for row in one["similarity"]] for one in found], axis=0)

    maps = [mean(arm.found) if arm.found else None for arm in arms]
    figure, grid, left, bottom = panels_of(len(arms), 4, 2.6)
    low = min([0.0] + [found.min() for found in maps if found is not None])
    for axes, arm, found in zip(grid, arms, maps):
        axes.set_title(short(arm.label, 18), fontsize=9)
        axes.grid(False)
        if found is None:
            note(axes, "no probe")
            axes.set(xticks=[], yticks=[])
            continue
        image = axes.imshow(found, cmap="viridis", vmin=low, vmax=1, origin="lower",
                            interpolation="nearest")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(5, integer=True))
    for axes in left:
        axes.set_ylabel("layer", fontsize=9)
    for axes in bottom:
        axes.set_xlabel("layer", fontsize=9)
    if any(found is not None for found in maps):
        figure.colorbar(image, ax=grid, shrink=0.8, label="cosine")
    save(figure, path)


def next_to_diagonal(table):
    return [table[i][i + 1] for i in range(len(table) - 1)]


def draw_distance(arms, path):
    """Similarity against the distance of layers, mean over pairs, and of neighbours against the
    layer."""
    figure = new_figure(3.6)
    distance, neighbours = figure.subplots(1, 2)
    draw_arms(distance, arms, ["similarity_by_distance"])
    near = [Arm(arm.label, arm.look, [{"near": next_to_diagonal(one["similarity"])}
                                      for one in arm.found]) for arm in arms]
    draw_arms(neighbours, near, ["near"])
    distance.set(xlabel="distance of layers", ylabel="cosine", title="by distance")
    neighbours.set(xlabel="layer", ylabel="cosine with the next", title="of neighbours")
    finish(figure, [distance, neighbours], arms, path)


def draw_ranks(arms, path):
    """Hard and soft rank of the ffn over its width against the layer, at both sites."""
    figure = new_figure(5.6)
    grid = list(figure.subplots(2, 2, sharex=True).flat)
    shown = [(key, site) for site in ("hidden", "up") for key in ("hard_rank", "soft_rank")]
    for axes, (key, site) in zip(grid, shown):
        draw_arms(axes, arms, [key, site])
        axes.set_title(f"{key.replace('_', ' ')}, {SITES[site]}", fontsize=10)
        axes.set_ylabel("rank / width of the ffn", fontsize=9)
    for axes in grid[2:]:
        axes.set_xlabel("layer", fontsize=9)
    finish(figure, grid, arms, path)


def draw_edr(arms, path):
    """EDR as the harmonic and the geometric mean, of both sites, on one scale from 0: a line of the
    picture for each arm, the mean with its interval, below it every run of several (hollow)."""
    figure = new_figure(1.7 + 0.3 * len(arms))
    grid, most = figure.subplots(1, 4, sharey=True, sharex=True), 0
    shown = [(key, site) for site in SITES for key in ("edr_harmonic", "edr_geometric")]
    for axes, (key, site) in zip(grid, shown):
        for y, arm in enumerate(arms):
            values = [one[key][site] for one in arm.found if one[key][site] is not None]
            if not values:
                continue
            interval, most = mean_interval(values), max(most, *values, 0)
            draw_interval(axes, interval, y, arm.look)
            if len(values) > 1:
                axes.plot(values, [y + 0.27] * len(values), arm.look["marker"], ms=4, mfc="none",
                          color=arm.look["color"])
                most = max(most, min(interval.high, 2 * max(values)))
        axes.set_title(f"{key[4:]} mean,\n{SITES[site]}", fontsize=9)
        axes.set_xlabel("EDR, % of the ffn's width", fontsize=9)
        axes.set_yticks(range(len(arms)), [short(arm.label) for arm in arms])
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if not axes.lines:
            note(axes, "nothing here")
    grid[0].set_xlim(0, min(100, 1.1 * most) or 100)
    grid[0].xaxis.set_major_locator(MaxNLocator(5))
    save(figure, path)


def draw_embedding(arms, path):
    """Eigenvalues of the embedding over their median (logarithmic), largest first, as they are and
    centred."""
    figure = new_figure(3.6)
    grid = list(figure.subplots(1, 2, sharey=True))
    for axes, kind in zip(grid, ("gram", "centred")):
        draw_arms(axes, arms, ["embedding_spectrum", kind], True, 1, markevery=0.15)
        axes.set_title({"gram": "EᵀE / V", "centred": "covariance"}[kind], fontsize=10)
        axes.set_xlabel("number of the eigenvalue", fontsize=9)
    grid[0].set_ylabel("eigenvalue / median", fontsize=9)
    finish(figure, grid, arms, path)


def draw_condition(arms, path):
    """Condition numbers of the ffn's matrices (logarithmic) against the layer."""
    figure = new_figure(5.6)
    grid = list(figure.subplots(2, 2, sharex=True).flat)
    shown = {"up": "up", "gate": "gate", "fused": "gate and up as one (MLP1)",
             "down": "down (MLP2)"}
    for axes, (part, title) in zip(grid, shown.items()):
        draw_arms(axes, arms, ["condition", part], True)
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("condition number", fontsize=9)
    for axes in grid[2:]:
        axes.set_xlabel("layer", fontsize=9)
    finish(figure, grid, arms, path)


def draw_streams(arms, path):
    """Root mean square of the stream and of the loss's gradient there, into block 0 (-1) and out of
    each block."""
    figure = new_figure(3.6)
    grid = list(figure.subplots(1, 2))
    for axes, key, title in zip(grid, ("residual_rms", "gradient_rms"), ("stream", "dL/dstream")):
        draw_arms(axes, arms, [key], True, -1)
        axes.set(xlabel="layer it leaves (−1: the embedding)", ylabel="root mean square",
                 title=title)
    finish(figure, grid, arms, path)


# Name of the picture: the function that draws it, its title and its caption.
PROBES = {
    "similarity": (
        draw_similarity, "Similarity of layers",
        "Cosine of the streams that leave two blocks, token by token; mean over tokens and runs."),
    "distance": (
        draw_distance, "Similarity by distance",
        "The same, mean over the pairs of layers so far apart. Flat and high: deep layers change "
        "little."),
    "ranks": (
        draw_ranks, "How much of the ffn is used",
        "Effective rank of the covariance of the ffn's activations over the ffn's width: hard is "
        "the participation ratio of the eigenvalues, soft the exponential of their entropy. 1: all "
        "directions alike."),
    "edr": (
        draw_edr, "EDR",
        "100 times the harmonic, or geometric, mean of hard and soft rank over the ffn's width, "
        "mean over layers, of the down projection's input and the up projection's output. 100: all "
        "directions alike. Hollow: each run."),
    "embedding": (
        draw_embedding, "Spectrum of the embedding",
        "Eigenvalues over their median. Flat: all directions of the embedding are used."),
    "condition": (
        draw_condition, "Condition of the ffn's matrices",
        "Largest over smallest singular value."),
    "streams": (
        draw_streams, "The stream and its gradient",
        "Of the validation data, at the end of training. The gradient is that of the sum of the "
        "tokens' losses, for each token."),
}


def draw_probes(arms, folder, prefix=""):
    """Draws all pictures of probes; returns (file name, title, caption) of each."""
    for name, (picture, *_) in PROBES.items():
        picture(arms, f"{folder}/{prefix}{name}.png")
    return [(f"{prefix}{name}.png", title, caption) for name, (_, title, caption) in PROBES.items()]


# ----------------------------------------------------------------------------------------- of logs

def layer_of(name):
    return int(name.split(".")[2]) if name.startswith("model.layers.") else None


def norms_by_layer(grad_norms, parts=None):
    """sqrt(sum of squares) of the gradient norms of each layer's tensors, or of its matrices named
    in parts alone."""
    squares = {}
    for name, value in grad_norms.items():
        layer = layer_of(name)
        wanted = parts is None or (name.endswith(".weight") and name.split(".")[-2] in parts)
        if layer is not None and wanted:
            squares[layer] = squares.get(layer, 0.0) + (np.nan if value is None else value ** 2)
    return np.sqrt([squares.get(layer, np.nan) for layer in range(max(squares, default=-1) + 1)])


def mean_norms(logs):
    """Steps, and an array [step][layer] of gradient norms: at each step the geometric mean over the
    logs that have it."""
    found = {}
    for log in logs:
        for line in diagnostics(log):
            found.setdefault(line["step"], []).append(norms_by_layer(line["grad_norms"]))
    steps = sorted(found)
    with np.errstate(divide="ignore"):
        return steps, np.array([np.exp(np.mean(np.log(found[step]), axis=0)) for step in steps])


def draw_gradients(arms, path):
    """Heat maps, one for each arm: gradient norm of a whole layer (colour, logarithmic) against
    layer and step; geometric mean over runs."""
    figure, grid, left, bottom = panels_of(len(arms), 4, 2.6)
    tables = [mean_norms(arm.found) for arm in arms]
    seen = np.concatenate([norms.ravel() for _, norms in tables] + [[]])
    seen = seen[np.isfinite(seen) & (seen > 0)]
    scale = LogNorm(max(seen.min(), 1e-12 * seen.max()), seen.max()) if len(seen) else None
    image = None
    for axes, arm, (steps, norms) in zip(grid, arms, tables):
        axes.set_title(short(arm.label, 18), fontsize=9)
        axes.grid(False)
        if not norms.size or scale is None:
            note(axes, "no diagnostics in the logs")
            axes.set(xticks=[], yticks=[])
            continue
        end = 2 * steps[-1] - steps[-2] if len(steps) > 1 else steps[-1] + 1
        image = axes.pcolormesh(np.append(steps, end), np.arange(norms.shape[1] + 1) - 0.5, norms.T,
                                norm=scale, cmap="viridis")
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    for axes in left:
        axes.set_ylabel("layer", fontsize=9)
    for axes in bottom:
        axes.set_xlabel("step", fontsize=9)
    if image is not None:
        figure.colorbar(image, ax=grid, shrink=0.8, label="gradient norm")
    save(figure, path)


def draw_groups(arms, path):
    """Gradient norms by layer, of groups of matrices: at the first step with diagnostics, at the
    one nearest to 100, and at the last."""
    every = sorted({line["step"] for arm in arms for log in arm.found for line in diagnostics(log)})
    every = every or [0]
    steps = sorted({every[0], min(every, key=lambda step: abs(step - 100)), every[-1]})

    def norms_at(arm, step, parts):
        lines = [line for log in arm.found for line in diagnostics(log) if line["step"] == step]
        found = [{"norms": list(norms_by_layer(line["grad_norms"], parts))} for line in lines]
        return Arm(arm.label, arm.look, found)

    figure = new_figure(0.7 + 2.2 * len(steps))
    grid = figure.subplots(len(steps), len(GROUPS), sharex=True, squeeze=False)
    for row, step in zip(grid, steps):
        for axes, (group, parts) in zip(row, GROUPS.items()):
            draw_arms(axes, [norms_at(arm, step, parts) for arm in arms], ["norms"], True)
            axes.set_title(f"{group}, step {step}")
        row[0].set_ylabel("gradient norm", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("layer", fontsize=9)
    finish(figure, list(grid.flat), arms, path)


LOGS = {
    "gradients": (
        draw_gradients, "Gradients by layer over the run",
        "Norm of the gradient of all tensors of a layer, before clipping; at each step the "
        "geometric mean over the seeds that came so far. The same colours for all."),
    "groups": (
        draw_groups, "Gradients by layer, of groups of matrices",
        "At the first step with diagnostics, near step 100 and at the end; geometric mean over the "
        "seeds and its 95 % interval. Flat: all layers learn at one pace."),
}


def draw(study, rows, folder):
    """The pictures that the study has data for; (file name, title, caption) of each."""
    deep = panel_name(deepest(study, rows))
    logs = arms_of(study, rows, lambda run: run.log if diagnostics(run.log) else None)
    probes = arms_of(study, rows, lambda run: run.probe)
    found = []
    for name, (picture, title, caption) in LOGS.items() if any(arm.found for arm in logs) else ():
        picture(logs, f"{folder}/{name}.png")
        found.append((f"{name}.png", title, caption))
    found += draw_probes(probes, folder) if any(arm.found for arm in probes) else []
    suffix = f", {deep}" if deep else ""
    return [(name, title + suffix, caption) for name, title, caption in found]
