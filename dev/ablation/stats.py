"""Numbers of a study with few seeds: intervals, paired differences, steps saved, the next learning
rate to try, and warnings where causes cannot be told apart.

Runs with the same seed have the same data in the same order and the same initial values of all
common weights. Differences are therefore taken seed by seed (paired): what the seed does to both
cancels. Losses are nats per token. A figure that cannot be computed is NaN in an interval, else
None.
"""
import collections
import dataclasses

import numpy as np
from scipy import stats

from ablation.study import COLLAPSED, DIVERGED, FINISHED

Interval = collections.namedtuple("Interval", "mean low high n sd")

MOST_PAIRS = 1000                            # more are not proposed
NO_FINAL_NORM = ("SPAN", "POST", "DEEPNORM", "KEEL")     # llmc/modes.h: fin is 0, not unit
# llmc/modes.h: sdd, or a norm in an out slot: its gain scales the whole branch
BRANCH_GAINS = ("SDD", "SDD_PRE", "PERI", "SANDWICH", "OLMO2")
# llmc/init.h: output projections start smaller with depth
SCALED_OUTPUTS = ("depth", "megatron", "scale", "scale-recipe")


# ---------------------------------------------------------------------------------------- intervals

def mean_interval(values, confidence=0.95):
    """mean +- t(1 - (1 - confidence)/2, n - 1) sd / sqrt(n), for values that scatter normally
    (Student, The probable error of a mean, 1908)."""
    n = len(values)
    mean, sd = np.mean(values) if n else np.nan, np.std(values, ddof=1) if n > 1 else np.nan
    half = stats.t.ppf(0.5 + confidence / 2, n - 1) * sd / np.sqrt(n) if n > 1 else np.nan
    return Interval(float(mean), float(mean - half), float(mean + half), n, float(sd))


def differences(a, b):
    """a - b for each seed that both have; a, b: seed -> loss, or None."""
    return [a[seed] - b[seed] for seed in a if a[seed] is not None and b.get(seed) is not None]


def paired_difference(a, b):
    """The interval of the mean of a - b over the common seeds."""
    return mean_interval(differences(a, b))


def seeds_needed(found, power=0.8, alpha=0.05):
    """The smallest n with P(T > t(1 - alpha/2, n - 1)) >= power, T noncentral t with n - 1 degrees
    and noncentrality |mean| sqrt(n) / sd: the pairs that a two-sided paired t test needs to see a
    difference of the found mean and deviation (Owen, A survey of properties and applications of the
    noncentral t-distribution, 1968; findings of the wrong sign are not counted). None with fewer
    than 2 pairs, or where MOST_PAIRS would not do, as for a mean of 0. A rough guide: from few
    pairs the deviation is rough too."""
    if len(found) < 2:
        return None
    mean, sd = abs(np.mean(found)), np.std(found, ddof=1)
    if mean == 0:
        return None
    # from an effect of 16 on 2 pairs do; nct fails for huge ones
    effect = mean / sd if mean < 100 * sd else 100.0
    def power_of(n):
        return stats.nct.sf(stats.t.ppf(1 - alpha / 2, n - 1), n - 1, effect * np.sqrt(n))

    return next((n for n in range(2, MOST_PAIRS + 1) if power_of(n) >= power), None)


# ------------------------------------------------------------------------------------------- curves

def smooth(values, width):
    """The mean of each value and the width - 1 before it, or of as many as there are."""
    sums, ends = np.concatenate([[0.0], np.cumsum(values)]), np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def filled(curve):
    """As an array, what is None or not finite interpolated: the trainer skips such a step. None
    where it ends so (diverged), or is empty."""
    values = np.array(curve, dtype=float)
    finite = np.isfinite(values)
    return np.interp(np.arange(len(values)), np.flatnonzero(finite),
                     values[finite]) if len(values) and finite[-1] else None


def first_at(curve, loss):
    """The first step, from 1, at which the curve is at or below the loss; it is somewhere."""
    return int(np.argmax(curve <= loss)) + 1


def steps_saved_once(a, b):
    steps = min(len(a), len(b))
    a, b = filled(a[:steps]), filled(b[:steps])
    if a is None or b is None:
        return None
    width = max(10, round(steps / 40))
    a, b = smooth(a, width), smooth(b, width)
    return (1 - first_at(a, b[-1]) / first_at(b, b[-1])
            if a[-1] <= b[-1] else first_at(b, a[-1]) / first_at(a, a[-1]) - 1)


def steps_saved(a, b):
    """The part of the steps by which a reaches b's final loss earlier than b does; negative: b
    reaches a's earlier. Interval over seeds.

    a, b: a training loss curve per seed, in the same order of seeds, a loss per step (None: not
    finite; a curve that is None, empty or ends so is left out with its partner). Per seed, over the
    steps that both have, smoothed over 2.5 % of them (10 at least): with L the final loss of the
    one that ends higher and s(L) the first step of a curve at or below L, saved = 1 - s_better(L) /
    s_worse(L). For falling curves s_worse(L) is the last step. Noise makes any curve touch L early;
    taken of both curves, which have the same batches and so nearly the same noise, this cancels; 1
    - s_better(L) / last does not, and shows savings between modes that are alike.

    With a learning rate that falls this understates: the better one passes L at a higher rate than
    the other's at its end, and would be lower still had its schedule ended there."""
    pairs = [steps_saved_once(one, other) for one, other in zip(a, b, strict=True)
             if one is not None and other is not None]
    return mean_interval([saved for saved in pairs if saved is not None])


# ----------------------------------------------------------------- the largest stable learning rate

def is_stable(final_losses, best, within):
    """Whether all runs at a rate finished (None: collapsed or diverged) with a mean loss of at most
    `within` above the mode's best mean so far (None: no best yet)."""
    if not final_losses or None in final_losses:
        return False
    return best is None or bool(np.mean(final_losses) <= best + within)


def bracket(tried):
    """The largest stable rate below the smallest unstable one, and that one; None where there is
    none. tried: rate -> whether it was stable."""
    unstable = min((rate for rate, good in tried.items() if not good), default=None)
    return max((rate for rate, good in tried.items()
                if good and (unstable is None or rate < unstable)), default=None), unstable


def next_rate(tried, start, factor=2.0, precision=1.25, lowest=1e-6, highest=1.0):
    """The rate to try next in the search for the largest stable one, None at its end: from the
    start up by the factor while rates are stable, down while they are not, then the geometric mean
    of the bracket until its ends are at most `precision` apart. Rates have 3 digits. Rates above
    the smallest unstable one are ignored. The search ends: no rate comes twice, and between lowest
    and highest there are finitely many."""
    low, high = bracket(tried)
    if low and high and high / low <= precision:
        return None
    rate = (start if not tried
            else low * factor if not high
            else high / factor if not low
            else (low * high) ** 0.5)
    rate = min(max(float(f"{rate:.3g}"), lowest), highest)
    return None if rate in tried else rate


# ----------------------------------------------------------------------------- the table of a study

@dataclasses.dataclass
class Row:
    """One value of the compared axis in one panel, at its best value of the tuned axis."""
    panel: dict
    level: str
    rate: object                             # best value; None: nothing tuned, or none finished
    finished: int                            # runs at the best value; all runs if none finished
    collapsed: int
    diverged: int
    total: int
    loss: Interval                           # final validation loss over the finished seeds
    difference: Interval | None              # to the baseline at its own best; its own is None
    seeds_needed: int | None                 # pairs that would show this difference
    saved: Interval | None                   # steps_saved against the baseline; its own is None
    runs: dict                               # seed -> Run at that value
    flops_per_token: float | None
    parameters: int | None
    edge: tuple | None = None                # edge(): the best tuned value is the last one tried


def cells(study, panel, level):
    """The runs of one panel and level: tuned value (None where nothing is tuned) -> seed -> Run."""
    return {rate: study.cell(panel, level, rate)
            for rate in (study.axes[study.tune] if study.tune else [None])}


def final_losses(runs):
    """seed -> final validation loss, of the runs that have one."""
    return {seed: loss for seed, run in runs.items() if (loss := run.final_loss()) is not None}


def choose(found):
    """The tuned value with the lowest mean final loss, among the cells with most finished seeds: a
    value at which a seed diverged does not win by the rest."""
    losses = {rate: list(final_losses(runs).values()) for rate, runs in found.items()}
    return min((rate for rate in losses if losses[rate]),
               key=lambda rate: (-len(losses[rate]), np.mean(losses[rate])), default=None)


def edge(found):
    """("lowest" or "highest", a value beyond) if the best tuned value is an end of those tried."""
    tried, best = sorted((rate for rate in found if found[rate]), key=float), choose(found)
    for word, ends in (("lowest", tried[:2]), ("highest", tried[:-3:-1])):
        if len(ends) == 2 and best == ends[0]:
            return word, float(best) ** 2 / float(ends[1])
    return None


def training_curve(run):
    """The training loss of each step, None where it was not finite."""
    losses = dict(zip(*run.series("loss")))
    return [losses.get(step) for step in range(1, max(losses, default=0) + 1)]


def summarize_level(panel, level, found, base):
    """base: the baseline's runs by seed; None: this is the baseline."""
    rate = choose(found)
    runs = found.get(rate, {})
    counted = list(runs.values()) or [run for cell in found.values() for run in cell.values()]
    losses, config = final_losses(runs), next((run.config for run in counted if run.config), {})
    ends = [sum(run.status == one for run in counted) for one in (FINISHED, COLLAPSED, DIVERGED)]
    row = Row(panel, level, rate, *ends, len(counted), mean_interval(list(losses.values())),
              None, None, None, runs, config.get("flops_per_token"), config.get("parameters"),
              edge(found) if rate is not None else None)
    if base is not None:
        theirs = final_losses(base)
        row.difference, row.seeds_needed = (paired_difference(losses, theirs),
                                            seeds_needed(differences(losses, theirs)))
        common = [seed for seed in losses if seed in theirs]
        row.saved = steps_saved([training_curve(runs[seed]) for seed in common],
                                [training_curve(base[seed]) for seed in common])
    return row


def summarize(study, baseline=None):
    """A Row for each panel and each value of the compared axis; baseline: the value the others are
    set against, the first if None."""
    baseline = study.axes[study.compare][0] if baseline is None else baseline
    rows = []
    for panel in study.panels():
        found = cells(study, panel, baseline)
        base = found.get(choose(found), {})
        rows += [summarize_level(panel, level, cells(study, panel, level), None if level == baseline
                                 else base) for level in study.axes[study.compare]]
    return rows


# ------------------------------------------------------------------------ causes mixed in one study

def confounded_panel(levels, compare):
    """Warnings about one panel. levels: level -> config of one of its runs."""
    for config in levels.values():
        if config["norm_mode"] == "LNS" and config["initialization"] in SCALED_OUTPUTS:
            yield (f"LNS starts with {config['initialization']}: LayerNorm Scaling's README "
                   "recommends normal, a scaled start weakens it (SpanNorm compared it under Scale "
                   "Init)\n  -> LNS with --init normal in a study of its own")
    if compare != "mode":
        return
    starts = {level: config["initialization"] for level, config in levels.items()}
    if len(set(starts.values())) > 1:
        yield ("the modes start differently "
               f"({', '.join(f'{level}: {start}' for level, start in starts.items())}): "
               "differences are those of placement and initialization together\n"
               "  -> --init NAME gives all the same")
    gains = [level for level, config in levels.items() if config["norm_mode"] in BRANCH_GAINS]
    decay = {config["flags"]["decay_gains"] for config in levels.values()} - {"off"}
    if decay and 0 < len(gains) < len(levels):
        yield (f"--decay-gains {min(decay)} also pulls at the gains of whole branches, which only "
               f"some of the modes have ({', '.join(gains)}): differences are partly the decay's\n"
               "  -> --decay-gains off")
    bare = [level for level, config in levels.items() if config["norm_mode"] in NO_FINAL_NORM
            and config["flags"]["final_norm"] == "auto"]
    if any(config["flags"]["tied"] == "on"
           for config in levels.values()) and 0 < len(bare) < len(levels):
        yield (f"the head is tied, and some modes have no final norm ({', '.join(bare)}) "
               "where others have one: the embedding's size sets their stream's start "
               "and their logits, and the last post norm's gain is the head's scale\n"
               "  -> --final-norm on for all, or --tied off")


def edges(study):
    """Warnings about best learning rates that are the lowest or highest of those tried with their
    level, in their panel."""
    levels = {}
    for panel in study.panels():
        for level in study.axes[study.compare]:
            found = cells(study, panel, level)
            if at := edge(found):
                levels.setdefault((at[0], choose(found), at[1]), {})[level] = True
    for (word, best, beyond), names in levels.items():
        yield (f"the best learning rate of {', '.join(names)} is the {word} tried, {best}: a "
               f"better one may lie beyond\n  -> add {beyond:.3g} to --lr")


def confounded(study):
    """Warnings, one or two lines each with what to do, where this study cannot tell two causes
    apart. Read from the axes and the runs' config.json."""
    found = []
    for panel in study.panels():
        runs = {level: [run for cell in cells(study, panel, level).values()
                        for run in cell.values()] for level in study.axes[study.compare]}
        found += confounded_panel({level: run.config for level in runs for run in runs[level]
                                   if run.config}, study.compare)
    if (study.compare == "mode" and len(study.axes["mode"]) > 1
        and len(study.axes.get("lr", [])) < 2):
        found.append("all modes run at one learning rate: this compares how well "
                     "it suits them, too (dev/LOG.md: SDD led at a low one)\n"
                     "  -> --lr A,B,C, so that each gets its best")
    if study.tune == "lr":
        found += edges(study)
    if len(study.axes["seed"]) < 3:
        found.append(f"seeds: {len(study.axes['seed'])}; one gives no interval, two "
                     "a very wide one: what a seed does can look like a difference\n"
                     f"  -> 3 seeds or more; with --out {study.folder} the runs there stay")
    return list(dict.fromkeys(found))
