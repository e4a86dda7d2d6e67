"""RESULTS.md and its pictures, from claims.toml and results/, and the rule that makes a verdict of
a claim's comparisons (statistic.py). Nobody marks anything by eye.

    a scale      the claim's comparisons at one width: all must agree, one that disagrees is enough,
                 each tested with Holm's correction over the claim's comparisons of this scale
    no verdict   while the best rate of an arm is the first or last tried; while "always" or
                 "never", or seeds alike where a run that was read diverged, has fewer than 8
                 seeds; while seeds are missing
    a claim      needs two scales, one of width 64 or more and one of 128 or more: what both say,
                 "agrees here, not there" where they contradict each other. Mathematics, and the
                 time of a step, need one
"""
import collections
import itertools
import json
import math
import os
import shlex
import textwrap

import numpy as np

import statistic
from ablation.study import read_json

PAPERS = {"S": "SpanNorm (S), and its earlier version FuseNorm (F)", "H": "HybridNorm",
          "D": "Scale-Distribution Decoupling (SDD)"}
WAITING = statistic.WAITING
EDGE, MIXED, ONE, ELSEWHERE = ("best rate at an edge", "agrees here, not there", "one scale",
                               "needs another machine")
ORDER = (statistic.AGREES, statistic.DISAGREES, MIXED, statistic.OPEN, ONE, EDGE, statistic.FEW,
         statistic.SIGN, WAITING, ELSEWHERE)
SMALL, LARGE = 64, 128                        # widths of the two scales, or more
# bf16 of an H100 or H200, dense, FLOP/s; the part of it that is counted on
PEAK, SHARE = 989e12, 0.4
# parameters up to which a run is given to one GPU, at 16 bytes for weight, gradient and AdamW
ONE_GPU = 4e9
AFFORDABLE = 200                              # GPU hours of a run up to which it gets three seeds
SCORED = 2e9                                  # tokens of a run from which on its tasks are scored


# ------------------------------------------------------------------------------------ at full scale

def gpu_hours(parameters, tokens):
    """6 operations for each parameter and token, at SHARE of a GPU's peak."""
    return 6 * parameters * tokens / (SHARE * PEAK) / 3600


def flag_values(flags):
    """Flag -> its values, of "--init scale,normal --probe"."""
    words, found = shlex.split(flags), {}
    for word in words:
        if word.startswith("--"):
            found[word[2:]] = []
        else:
            found[list(found)[-1]] = word.split(",")
    return found


def scoring(claim, model):
    """Flags for the tasks of the paper's tables (data/get.py), and its validation text."""
    suite = {"S": "spannorm", "D": "sdd"}.get(
        claim["id"][0], "hybridnorm-moe" if model.startswith("olmoe") else "hybridnorm")
    return f" --tasks data/{suite}" + (" --val-data data/c4-val" if suite != "spannorm" else "")


def ablate_command(mode, model, tokens, words, seeds, name):
    """One run for each GPU at a time."""
    words = f"--tokens {tokens:.0f} {words} --seed {','.join(seeds)}".replace("  ", " ")
    return (f"python3 dev/ablate.py --mode {mode} --model {model} --data DATA {words} "
            f"--out ablations/full-{name}")


def torchrun_command(model, steps, axes, name):
    """One run after the other, each on the GPUs of a node; flags with several values are loops of
    the shell."""
    variable = lambda flag: flag.replace("-", "_")
    several = {flag: values for flag, values in axes.items() if len(values) > 1 or flag == "mode"}
    loops = "".join(f"for {variable(flag)} in {' '.join(values)}; do "
                    for flag, values in several.items())
    flags = "".join(f"--{flag} {'$' + variable(flag) if flag in several else ' '.join(values)} "
                    for flag, values in axes.items() if flag not in ("mode", "probe"))
    out = f"runs/{name}-" + "-".join("$" + variable(flag) for flag in several)
    train = (f"torchrun --no-python --nproc-per-node 8 ./train_gpt --model {model} --data DATA "
             f"--steps {steps} {flags}--val-every {max(1, steps // 20)} --out {out} "
             "--resume auto")
    return (f"{loops}make -s train_gpt NORM_MODE=$mode && {train}{'; done' * len(several)}"
            + (f"; python3 dev/probe.py runs/{name}-*" if "probe" in axes else ""))


def full_scale(claim, models):
    """[(command, runs, GPU hours of all), ...], one for each model and text of flags."""
    full, found = claim["full"], []
    flags = full["flags"] if isinstance(full["flags"], list) else [full["flags"]]
    modes = full["mode"] if isinstance(full["mode"], list) else [full["mode"]] * len(flags)
    # tokens of each model, or one number for all
    given = full["tokens"] if isinstance(full["tokens"], list) else itertools.repeat(full["tokens"])
    for (model, tokens), (number, mode, words) in itertools.product(
            zip(full["model"].split(","), given), zip(itertools.count(1), modes, flags)):
        parameters, batch, layers, everything = models[model]
        words += scoring(claim, model) if tokens >= SCORED else ""
        axes = dict(mode=mode.split(","), **flag_values(words))
        sizes = [parameters * int(depth) / layers for depth in axes.get("layers", [layers])]
        arms = int(np.prod([len(values) or 1 for values in axes.values()]))
        one = gpu_hours(float(np.mean(sizes)), tokens)
        alone = everything * max(sizes) / parameters <= ONE_GPU
        seeds = ["1", "2", "3"] if one <= AFFORDABLE and alone else ["1"]
        name = (claim["id"] + (f"-{model}" if "," in full["model"] else "")
                + (f"-{number}" if len(flags) > 1 else ""))
        command = (ablate_command(mode, model, tokens, words, seeds, name)
                   if alone else torchrun_command(model, round(tokens / batch), axes, name))
        command += f"; python3 dev/repro/scores.py {claim['id']}" if tokens >= SCORED else ""
        found.append((command, arms * len(seeds), arms * len(seeds) * one))
    return found


def hours(value):
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# ----------------------------------------------------------------------------------------- verdicts

# One width, or several that one statistic compares: sides with Holm's correction and without it.
Scale = collections.namedtuple("Scale", "widths rows sides plain edges missing read beside lacking",
                               defaults=[()])
# `plain`: the verdict without Holm's correction
Outcome = collections.namedtuple("Outcome", "verdict scales plain")


def verdict_of(sides):
    """Several comparisons: all must agree; one that disagrees is enough."""
    return (statistic.SIGN if statistic.SIGN in sides
            else statistic.DISAGREES if statistic.DISAGREES in sides
            else statistic.AGREES if sides and set(sides) == {statistic.AGREES}
            else statistic.OPEN)


def flag_of(axis, name, run, results):
    """A flag of a run of a study, as a number: of the run, or of the whole study."""
    return int(run["axes"].get(axis) or results[name]["flags"][axis])


def tokens_of(name, run, results):
    return (run["steps"] * flag_of("batch", name, run, results)
            * flag_of("seq", name, run, results))


def widths_of(claim, read, results):
    if claim["study"] == "timing":
        words = results.get("timing", {}).get("flags", "").split()
        return {int(words[words.index("--width") + 1])} if "--width" in words else set()
    return {flag_of("width", *one, results) for one in read}


def scale_of(claim, results, calculation, width):
    rows, tests, functions, beside = statistic.evaluate(claim, results, calculation, width)
    return Scale(widths_of(claim, functions.read or beside, results), rows,
                 statistic.holm_sides(tests), statistic.plain_sides(tests),
                 list(dict.fromkeys(functions.edges)), functions.missing, functions.read, beside,
                 functions.lacking)


def scale_verdict(scale, sides):
    """What one scale says by itself, or why it says nothing."""
    return (WAITING if scale.missing or WAITING in sides
            else EDGE if scale.edges
            else statistic.FEW if statistic.FEW in sides
            else verdict_of(sides))


def has_say(scale):
    return max(scale.widths, default=SMALL) >= SMALL


def two_scales(scales):
    widths = set().union(*(scale.widths for scale in scales))
    return any(SMALL <= width < LARGE for width in widths) and any(width >= LARGE
                                                                   for width in widths)


def combined(claim, scales, sides_of):
    """The verdict of all scales; sides_of: corrected or plain."""
    says = [scale_verdict(scale, sides_of(scale)) for scale in scales]
    if not scales:
        return WAITING
    if claim["study"] in ("calculations", "timing") or statistic.SIGN in says:
        return says[0]
    whole = [scale for scale, said in zip(scales, says) if said != WAITING]
    if not two_scales(whole):
        return WAITING if not whole or two_scales(scales) else ONE
    voices = [said for scale, said in zip(scales, says) if has_say(scale)]
    for reason in (WAITING, EDGE, statistic.FEW):
        if reason in voices:
            return reason
    if statistic.AGREES in voices and statistic.DISAGREES in voices:
        return MIXED
    return voices[0] if len(set(voices)) == 1 else statistic.OPEN


def widths_run(study, results):
    """Widths at which a study was run: None for its own, unless that was run again."""
    others = sorted(int(name.partition("@")[2]) for name in results
                    if name.partition("@")[0] == study and "@" in name)
    again = int(statistic.own_width(results, study) or 0) in others
    return ([] if again else [None]) + others


def judge(claim, results, calculation):
    """A claim's verdict, and the scales it is made of."""
    if "expect" not in claim:
        return Outcome(ELSEWHERE, [], ELSEWHERE)
    scales = []
    for width in widths_run(claim["study"], results):
        try:
            scales.append(scale_of(claim, results, calculation, width))
        except statistic.Waiting:             # nothing was run at this width
            pass
    return Outcome(combined(claim, scales, lambda scale: scale.sides), scales,
                   combined(claim, scales, lambda scale: scale.plain))


def calculation_of(results):
    def calculation(*words):
        figures = results.get("calculations", {}).get("figures", {})
        name = " ".join(map(str, words))
        if name not in figures:
            raise statistic.Waiting("calculations")
        return statistic.Seeds(figures[name])
    return calculation


def number(value):
    return ("not finite" if not np.isfinite(value)
            else f"{value:.3g}" if abs(value) < 10000
            else f"{value:.2e}")


def expected(wanted, margin):
    """What was predicted of a comparison, in words; nothing if it has no side."""
    if wanted in (None, "sign"):
        return ""
    kind, *bounds = wanted.split()
    return {"in": f"between {' and '.join(bounds)}", "order": "above 0",
            "like": f"alike within {margin}", "not above": f"above by less than {margin}",
            "not below": f"below by less than {margin}"}.get(
                wanted if kind == "not" else kind, wanted)


def figure(seeds, wanted, side=None, plain=None):
    """A comparison at one scale: the figure with its interval, and the side it came out on."""
    if seeds is None:
        return "not run yet" if side else ""
    if not seeds:
        text = "every run failed"
    elif wanted in ("always", "never") or wanted is None and set(seeds.values()) <= {0.0, 1.0}:
        hits = sum(map(bool, seeds.values()))
        low, high = statistic.proportion_interval(hits, len(seeds))
        text = f"{hits} of {len(seeds)} ({low:.2f} to {high:.2f})"
    elif wanted == "order":
        text = f"{number(seeds['exact'])}, p {number(seeds.p)} by permutation"
    else:
        found = statistic.interval(seeds)
        text = number(found.mean)
        if number(found.low) != number(found.high):      # one seed has none, nor have seeds alike
            text += f" ({number(found.low)} to {number(found.high)})"
    if wanted and wanted != "sign":
        text += f": {side}" + (f" (uncorrected: {plain})" if plain != side else "")
    return text


def cell(text):
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


# ----------------------------------------------------------------------------------------- the page

def span(values, write):
    low, high = write(min(values)), write(max(values))
    return low if low == high else f"{low} to {high}"


def short(value):
    return (f"{value / 1e6:.3g}M" if value >= 1e6
            else f"{value / 1e3:.3g}k" if value >= 1e3
            else f"{value:.2g}" if value < 100
            else f"{value:.0f}")


def size_text(read, results):
    """Layers, tokens, parameters and tokens per parameter of runs."""
    layers = [flag_of("layers", *one, results) for one in read]
    sizes = [(run["parameters"], tokens_of(name, run, results)) for name, run in read]
    return (f"{span(layers, str)} layers, "
            f"{span([tokens for _, tokens in sizes], short)} tokens, "
            f"{span([parameters for parameters, _ in sizes], short)} parameters, "
            f"{span([tokens / parameters for parameters, tokens in sizes], short)} tokens a "
            "parameter")


def most_tokens(results):
    """The longest run of the studies on the built-in stories."""
    return max(tokens_of(name, run, results) for name, found in results.items()
               for run in found.get("runs", []) if "data" not in found["flags"])


def place(name):
    base = name.partition("@")[0]
    return {"calculations": "[calculations](calculations.py)",
            "timing": "`--timing`"}.get(base, f"[{name}]({base}.toml)")


def models_text(claim, scale, results):
    """What was run at one scale: sizes, studies and their seeds."""
    read = scale.read or scale.beside
    seeds = {}
    for name, run in read:
        seeds.setdefault(name, set()).add(run["axes"]["seed"])
    runs = ", ".join(f"{place(name)}: {len(found)} seed" + "s" * (len(found) > 1)
                     for name, found in seeds.items())
    if not read:
        drawn = max(([*found] for _, found, _ in scale.rows[:len(scale.sides)] if found), key=len,
                    default=[])
        many = ("exact" if drawn == ["exact"]
                else f"{len(drawn)} rounds" if claim["study"] == "timing"
                else f"{len(drawn)} seeds")
        runs = f"{place(claim['study'])}: {many}"
    if claim["study"] == "timing":
        return f"`{results['timing']['flags']}`; {runs}"
    if not read:
        return runs
    return ("" if scale.read else "not run yet; beside it ") + f"{size_text(read, results)}; {runs}"


def comparisons(claim, scales):
    """A claim's comparisons as a table with a column for each scale. Those without a say stand in
    italics, below the table if they name a width (study@128)."""
    said = [scale_verdict(scale, scale.sides) for scale in scales]
    widths = [f"width {span(scale.widths, str)}" if scale.widths else "here" for scale in scales]
    lines, elsewhere = [["", "expected", *widths], ["---"] * (2 + len(scales))], []
    for i, (what, _, wanted) in enumerate(scales[0].rows):
        judged = i < len(claim["expect"])
        figures = [figure(scale.rows[i][1], wanted,
                          *((scale.sides[i], scale.plain[i]) if judged else ()))
                   for scale in scales]
        if not judged and "@" in claim["also"][i - len(claim["expect"])][1]:
            elsewhere += [f"*{cell(what)}* {found}" for found in dict.fromkeys(figures) if found]
        elif any(figures):
            lines.append([cell(what) if judged else f"*{cell(what)}*",
                          cell(expected(wanted, claim.get("margin"))), *figures])
    lines.append(["**this scale**", "", *(f"**{verdict}**" for verdict in said)])
    table = [f"| {' | '.join(cells)} |" for cells in lines]
    return table + (["", f"Elsewhere: {'; '.join(elsewhere)}"] if elsewhere else [])


def list_of(seeds):
    return ", ".join(sorted(seeds, key=int))


def reasons(claim, outcome):
    """What a verdict lacks, one sentence each, and the command that brings it nearer."""
    import repro
    found = []
    if outcome.verdict == ONE:
        widths = sorted(set().union(*(scale.widths for scale in outcome.scales)))
        found.append(f"a verdict needs widths of {SMALL} and of {LARGE} or more, there is "
                     f"{' and '.join(map(str, widths))}")
    for scale in filter(has_say, outcome.scales):
        found += [f"{name} lacks seeds {list_of(seeds)}" for name, seeds in scale.missing.items()]
        found += [f"{name} was run without {what}: `python3 dev/repro/repro.py --fresh {name}`, if "
                  "claims.toml's [keep] has it"
                  for name, what in dict.fromkeys(scale.lacking)]
        ends = {}
        for end, arm in scale.edges:
            ends.setdefault(end, []).append(arm)
        found += [f"{end} of {'; '.join(arms)}" for end, arms in ends.items()]
        if statistic.FEW in scale.sides:
            found.append(f"fewer than {statistic.FAIL_SEEDS} seeds at width "
                         f"{span(scale.widths, str)}: add some to the study's file")
    if claim["study"] == "timing" and outcome.verdict == WAITING:
        return found + ["`python3 dev/repro/repro.py --timing`, six minutes of a machine with "
                        "nothing else to do"]
    bases = {claim["study"], *claim.get("reads", [])}
    left = [name for name in repro.studies() if name.partition("@")[0] in bases
            and repro.missing(name)]
    if left and outcome.verdict in (ONE, WAITING):
        found.append(f"not run yet: `python3 dev/repro/repro.py {' '.join(left)}`")
    return found


def claim_section(claim, outcome, results):
    """A claim under a heading, so that pages can link to it."""
    source = "Paper" if claim["id"][0] in PAPERS else "Known elsewhere"
    lines = [f"### {claim['id']}", "", f"**{outcome.verdict}**: {cell(claim['claim'])}", "",
             f"- {source} ({cell(claim['where'])}): {cell(claim['paper'])}"]
    for field, label in (("trap", "Remark"), ("margin_from", "Margin"), ("needs", "Needs")):
        if claim.get(field):
            lines.append(f"- {label}: {cell(claim[field])}")
    if "was" in claim or "put_right" in claim:
        was = claim.get("was", "not there")
        why = claim.get("put_right", "" if was == outcome.verdict else
                        f"judged at widths of {SMALL} and {LARGE} now")
        lines.append(f"- Before these rules: {was}" + (f"; {cell(why)}" if why else ""))
    if outcome.verdict != ELSEWHERE:
        lines += [f"- Limit: {cell(reason)}" for reason in reasons(claim, outcome)]
    if outcome.scales:
        lines += [f"- Runs{f', width {span(scale.widths, str)}' if scale.widths else ''}: "
                  f"{models_text(claim, scale, results)}" for scale in outcome.scales]
        lines += ["", *comparisons(claim, outcome.scales)]
    return lines + [""]


def overview(claims, outcomes):
    lines = ["| | verdict | before these rules | claim |", "|---|---|---|---|"]
    for claim in claims:
        name = claim["id"]
        lines.append(f"| [{name}](#{name.lower()}) | {outcomes[name].verdict} | "
                     f"{claim.get('was', '')} | {cell(claim['claim'])} |")
    return lines + [""]


def count_line(name, verdicts):
    found = collections.Counter(verdicts)
    cells = " | ".join(str(found[verdict]) for verdict in ORDER)
    return f"| {name} | {cells} | {sum(found.values())} |"


def sided(table):
    """The claims that predict a side."""
    return [claim for claim in table["claim"]
            if any(side != "sign" for *_, side in claim.get("expect", []))]


def counts(table, outcomes):
    """Verdicts of each paper, of all with and without Holm's correction, and of all as they were
    before the rule."""
    lines = ["| | " + " | ".join(ORDER) + " | all |", "|---" * (len(ORDER) + 2) + "|"]
    for letter, paper in PAPERS.items():
        lines.append(count_line(paper, [outcome.verdict for name, outcome in outcomes.items()
                                        if name.startswith(letter)]))
    lines.append(count_line("**all**", [outcome.verdict for outcome in outcomes.values()]))
    for name, right in (("their side fixed before the figure was seen", False),
                        ("corrected or added since", True)):
        lines.append(count_line(name, [outcomes[claim["id"]].verdict for claim in sided(table)
                                       if ("put_right" in claim) == right]))
    lines.append(count_line("without Holm's correction",
                            [outcome.plain for outcome in outcomes.values()]))
    lines.append(count_line("before these rules", [claim["was"] for claim in table["claim"]
                                                   if "was" in claim]))
    return lines


def comparison_counts(outcomes):
    """How many single comparisons lie on which side, with Holm's correction and without it, of the
    scales that have a say."""
    voices = [scale for outcome in outcomes.values() for scale in filter(has_say, outcome.scales)
              if scale_verdict(scale, scale.sides) not in (EDGE, WAITING)]
    lines = ["| single comparisons that have a say, no best rate at an edge | agrees | "
             "disagrees | not resolved | too few seeds | all |", "|---|---|---|---|---|---|"]
    for name, sides_of in (("with Holm's correction", lambda scale: scale.sides),
                           ("without it", lambda scale: scale.plain)):
        found = collections.Counter(side for scale in voices for side in sides_of(scale))
        cells = [found[side] for side in (statistic.AGREES, statistic.DISAGREES, statistic.OPEN,
                                          statistic.FEW)]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} | {sum(cells)} |")
    return lines


def ascending(axis, values):
    return sorted(values, key=float) if axis == "lr" else values


def described(found):
    flags = dict(found["flags"], **{axis: ", ".join(ascending(axis, values)) for axis, values
                                    in found["axes"].items() if axis not in ("mode", "seed")})
    words = [f"{flags[name]} {what}" for name, what in (("layers", "layers"), ("width", "wide"),
                                                        ("steps", "steps")) if name in flags]
    if "batch" in flags and "seq" in flags:
        words.append(f"of {int(flags['batch']) * int(flags['seq'])} tokens")
    return (", ".join(words).replace("steps, of", "steps of")
            + (f"; rates {flags['lr']}" if "lr" in flags else "")
            + f"; seeds {', '.join(found['axes']['seed'])}")


def study_rows(table, results):
    import repro
    lines = ["| study | claims | scale | runs | minutes of a core, expected | spent |",
             "|---|---|---|---|---|---|"]
    for name in repro.studies():
        claims = ", ".join(claim["id"] for claim in repro.claims_of(table, name))
        found, axes = results.get(name), repro.read_study(name)
        several = {axis: values for axis, values in axes.items()
                   if len(values) > 1 or axis in ("mode", "seed")}
        fixed = {axis: values[0] for axis, values in axes.items() if axis not in several}
        scale = described({"axes": several, "flags": fixed})
        total = len(repro.study_runs(name))
        ended = found["runs"] if found else []
        spent = f"{sum(run['seconds'] or 0 for run in ended) / 60:.1f}" if ended else ""
        commits = ", ".join(sorted({run["commit"] for run in ended}))
        runs = f"{len(ended)} of {total}" + (f", commit {commits}" if ended else "")
        lines.append(f"| {place(name)} | {claims} | {scale} | {runs} | "
                     f"{repro.stated_minutes(name):.1f} | {spent} |")
    return lines


def arm_text(runs):
    """One arm: the mean, the lowest and the highest loss of the seeds that did not fail, and how
    many failed."""
    losses = [run["loss"] for run in runs if not statistic.failed(run)]
    failed = sum(map(statistic.failed, runs))
    text = f"{np.mean(losses):.3f}" if losses else ""
    if len(losses) > 1:
        text += f" ({min(losses):.3f} to {max(losses):.3f})"
    return ", ".join(filter(None, (text, f"{failed} of {len(runs)} fail" if failed else "")))


def runs_with(found, axes):
    """A study's runs with these values; None stands for an axis that the study does not have."""
    return [run for run in found["runs"]
            if all(run["axes"].get(axis) == value for axis, value in axes.items())]


def loss_grids(results):
    """Final losses of the studies that train: a row for each arm but for its rate, a column for
    each rate."""
    import repro
    lines = []
    for name in repro.studies():
        found = results.get(name)
        if not found or int(found["flags"]["steps"]) <= int(found["flags"]["warmup"]):
            continue
        axes = found["axes"]
        others = [axis for axis in axes if axis == "mode"
                  or axis not in ("lr", "seed") and len(axes[axis]) > 1]
        rates = ascending("lr", axes["lr"]) if "lr" in axes else [None]
        heads = others + [f"rate {rate or found['flags'].get('lr', '')}" for rate in rates]
        lines += [f"### {name}", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for arm in itertools.product(*(axes[axis] for axis in others)):
            losses = [arm_text(runs_with(found, dict(zip(others, arm), lr=rate))) for rate in rates]
            if any(losses):
                lines.append("| " + " | ".join([*arm, *losses]) + " |")
        lines.append("")
    return lines


def usual(flags):
    """Whether a run has a placement's usual recipe, so that its learning rate is comparable."""
    return (int(flags["steps"]) > 100 and int(flags["warmup"]) > 0
            and flags.get("init") != "global" and flags.get("optimizer", "adamw") == "adamw"
            and flags.get("width-base", "0") == "0" and flags.get("sdd", "paper") == "paper"
            and flags.get("mix-ratio", "0.25") == "0.25" and "init-std" not in flags)


# flags that do not change what is trained
BESIDE = ("norms-every", "val-every", "val-tokens", "save-every", "keep-last", "micro-batch")


def usual_runs(results):
    """Placement -> its different runs of the usual recipe, as pairs of flags and run."""
    import repro
    pairs = {}
    for name, study in results.items():
        for key, run in repro.by_key(name, study).items() if "runs" in study else ():
            flags = {flag: value for flag, value in json.loads(key).items()
                     if flag not in BESIDE}
            if usual(flags):
                same = json.dumps(flags, sort_keys=True)
                pairs.setdefault(flags["mode"], {})[same] = flags, run
    return {mode: [*runs.values()] for mode, runs in pairs.items()}


def border(pairs, width, layers):
    """The largest rate below the smallest one that failed, and that one, of the recipe (all flags
    but rate and seed) that fails first; None where there is no such rate. Recipes with one rate
    are left out: they show no border."""
    recipes = {}
    for flags, run in pairs:
        if (int(flags["width"]), int(flags["layers"])) == (width, layers):
            recipe = json.dumps({**flags, "lr": "", "seed": ""}, sort_keys=True)
            recipes.setdefault(recipe, []).append((float(flags["lr"]), statistic.failed(run)))
    found = []
    for runs in recipes.values():
        first = min((rate for rate, failed in runs if failed), default=math.inf)
        low = max((rate for rate, _ in runs if rate < first), default=0)
        if len({rate for rate, _ in runs}) > 1:
            found.append((first, -low))
    first, low = min(found, default=(math.inf, 0))
    return -low or None, None if first == math.inf else first


def borders(pairs, width):
    """Layers -> border, for the depths that have one."""
    known = {depth: border(pairs, width, depth)
             for depth in sorted({int(flags["layers"]) for flags, _ in pairs})}
    return {depth: ends for depth, ends in known.items() if any(ends)}


def failing_tables(results):
    """For each width a row for a placement, a column for a depth: rates around the border."""
    pairs = usual_runs(results)
    share = lambda runs: np.mean([statistic.failed(run) for _, run in runs])
    modes = sorted(pairs, key=lambda mode: (share(pairs[mode]), mode))
    write = lambda rate: "" if rate is None else f"{rate:.3g}"
    lines = []
    for width in (SMALL, LARGE):
        known = {mode: borders(pairs[mode], width) for mode in modes}
        depths = sorted({depth for ends in known.values() for depth in ends})
        lines += [f"| width {width} | failed | " + " | ".join(f"{depth} layers" for depth in depths)
                  + " |", "|---" * (len(depths) + 2) + "|"]
        for mode in modes:
            runs = [run for flags, run in pairs[mode] if int(flags["width"]) == width]
            cells = [f"{write(low)} / {write(first)}" if first else write(low)
                     for low, first in (known[mode].get(depth, (None, None)) for depth in depths)]
            if any(cells):
                lines.append(f"| {cell(mode)} | {sum(map(statistic.failed, runs))} of {len(runs)} "
                             f"| {' | '.join(cells)} |")
        lines.append("")
    return lines


HEAD = """# What reproduces at small scale

Written by `python3 dev/repro/repro.py` from [claims.toml](claims.toml) and [results/](results/);
`--table` writes it again without runs, `--fresh STUDY` runs a study anew. {count} claims of four
papers, {sided} of them with a predicted side. For {plain} of these the side was written down
before the figure was looked at; the other {corrected} were corrected or added afterwards, and say
so.

Claims without a verdict lack a second width, runs, seeds or a predicted side, have a best rate at
an end of a grid, or need another machine (the last table has the commands). The models of the
built-in stories were trained on at most {tokens} tokens, far fewer than any paper's. Verdicts say
what such models do, and neither confirm nor refute a paper. *Before these rules* is the verdict of
an earlier version, with one width and no correction.

**The rule**, mechanical (report.py, statistic.py), nobody marks anything by eye:

1. A comparison *agrees* if its 95 % interval lies wholly on the predicted side, *disagrees* if
   wholly on the other. A claim agrees if all its comparisons do, and disagrees if one does; but a
   missing run, a best rate at an end of the grid or too few seeds (in this order) come first.
   Comparisons are tested with Holm's correction over the claim's comparisons of that scale; what
   each would be without it is in the row. With three seeds a claim of many comparisons (H8, H19)
   can hardly agree.
2. There is no verdict while the best learning rate of an arm is the first or the last tried. Where
   a study has one rate, nothing shows that it is the best. A rate that kills counts as tried, so a
   best rate beside it may be too low. Rows in italics are not checked.
3. *Always* and *never* need {fail_seeds} seeds or more. They agree if all seeds are alike, and
   disagree if Clopper and Pearson's interval of the proportion lies below one half.
4. Likeness is a test of its own (equivalence): the interval lies within a margin that is taken from
   the paper, named with the claim. Not different is not alike. The bounds of *between* are our own
   where the paper has none. *Sign only*: the paper contradicts itself, the sign is printed.
5. An order over placements is a rank correlation, tested by permuting placements, not seeds.
6. A verdict needs two scales, one of width {small} or more and one of {large} or more, which is
   also what guards against chance over {parts} comparisons at each: both have to say the same. If
   they contradict each other, *agrees here, not there* is the verdict. Else the claim reads *one
   scale* and has none. Mathematics, and the time of a step, need no second scale. Width 32 has no
   say.

Figures are means over seeds with 95 % t intervals. An *arm* is a placement with its
[start](../../doc/models.md). Arms with the same seed are pairs (the same data in the same order,
the same bits in common weights): differences are taken seed by seed. Losses are nats per byte of
the built-in stories at the end of the run, validation, each arm at its best rate of the study's
grid unless the row names one. The seeds that are tested also chose that rate, which favours the arm
whose rates lie closest together. Gradients are those of the FFN's weights unless the row says
otherwise. A run *fails* if it diverges or ends above 0.98 of the entropy of the bytes' frequencies
(collapsed); one that diverged counts with that entropy in means. Some rows ask of a mean whether a
model trains: it then has to end 0.5 nats below that entropy, and as it is a mean, rule 3 does not
count its seeds. Spectra, similarities and spreads of gradients are read from the runs that did not
fail. Some claims share comparisons, so that verdicts are not independent. Further measurements
stand in italics and have no say. *Runs* says how many tokens the models saw: a disagreement is one
with this scale, not with the paper's.
"""

QUESTIONS = """By the same rule, and not counted above. These models are 128 wide and saw 0.5, 2 or
8 million bytes of Debian's English (`data/get.py debian --vocab bytes`), so losses are nats per
byte of that. Rates were chosen with seed 1, which is also one of those tested. There is no second
width, so no verdict can be more than *one scale*. Margins are our own."""

LOSSES = """At the end of the runs: the mean of the seeds that did not fail, the lowest and the
highest of them. Ranges overlap more than paired differences do: use the claims' intervals, whose
means keep runs that failed."""

BORDERS_PICTURE = "![The learning rate that kills a run, over the layers](failing.png)"

FAILING = """## Rates that kill a run

AdamW, more than 100 steps, with warmup, from any start but Global Init. Left out: studies with one
rate, even where it fails (POST, 24 layers of real text, 2e-3), and other recipes:
no warmup, `--init-std`, `--width-base`, another `--mix-ratio` than 0.25, the settings of SDD's
code, Muon. *a / b*: no run with a rate up to a failed, some or all with b did. *a*: none failed, a
is the highest rate tried. If studies differ in the start, the warmup, the batch or the text, the
one that fails first is shown. *failed* counts different runs
of this width. NGPT's 0.001 is too low: 300 steps leave its loss above the entropy.
"""

FULL = """## At the papers' scale

Hours of one H100 or H200: 6 operations for each active parameter and token, at {share:.0f} % of
{peak:.0f} TFLOP/s. Three seeds where a run takes at most {affordable} of them. Models above
{one:.0f}B parameters in all go over the eight GPUs of a node. DATA is a folder of shards. With the
paper's tokenizer (`data/get.py --vocab`: Mistral 7B's, OLMo 2's, OLMoE's) the models have the
paper's size; with GPT-2's add `--vocab 50257`. Other text than the paper's compares placements with
each other, not with its figures.

A run of {scored:.0f} billion tokens or more is scored on the tasks of its paper's tables at each
validation and at the end. The task files need the tokenizer of DATA: `data/get.py --vocab TOKENIZER
spannorm` (or hybridnorm, hybridnorm-moe, sdd) writes them to data/spannorm. HybridNorm and SDD
validate on C4: `data/get.py --vocab TOKENIZER c4-val --tokens 10000000`; `--from RUN --eval
--val-data` gives the Pile's (`pile-val`). [scores.py](scores.py) ends each command with the rows of
the paper's table and ours. None of this has been run.

| claim | command | runs | GPU hours |
|---|---|---|---|"""


def score_lines():
    """The papers' tables of scores beside ours, once there are runs of their scale."""
    import scores
    kept = scores.read_kept()
    drawn = scores.draw([*kept], kept, scores.read_tables())
    return ["## Scores at the papers' scale", "", *drawn] if kept else []


def render(table, here, results):
    import repro
    outcomes = {claim["id"]: judge(claim, results, calculation_of(results))
                for claim in table["claim"]}
    ended = [run for name, found in results.items() for run in found.get("runs", [])]
    parts = sum(len(claim.get("expect", [])) for claim in table["claim"])
    corrected = sum("put_right" in claim for claim in sided(table))
    lines = HEAD.format(count=len(table["claim"]), parts=parts, fail_seeds=statistic.FAIL_SEEDS,
                        small=SMALL, large=LARGE, tokens=short(most_tokens(results)),
                        corrected=corrected, plain=len(sided(table)) - corrected,
                        sided=len(sided(table))).splitlines()
    lines += ["", *counts(table, outcomes), "", *comparison_counts(outcomes)]
    total = sum(repro.stated_minutes(name) for name in repro.studies())
    done = sum(repro.stated_minutes(name) for name in repro.studies() if not repro.missing(name))
    dirty = sum("dirty" in run["commit"] for run in ended)
    spent = sum(run["seconds"] or 0 for run in ended) / 3600
    lines += ["", *textwrap.wrap(
        f"{len(ended)} runs so far; they took {spent:.1f} hours, waiting for shared cores "
        f"included. All studies need an estimated {total / 60:.1f} hours of one core; those that "
        f"are complete were estimated at {done / 60:.1f}. {dirty} runs were made before runs had "
        "to come from a clean commit (*-dirty* below); until then another study's new results "
        "made a commit dirty. Commits 2fc7649 and d422c52 are not in this history any more.",
        100), ""]
    for letter, paper in PAPERS.items():
        note = textwrap.wrap(table["paper"].get(letter, ""), 100)
        lines += [f"## {paper}", ""] + (note + [""] if note else [])
        claims = [claim for claim in table["claim"] if claim["id"].startswith(letter)]
        lines += overview(claims, outcomes)
        lines += [line for claim in claims
                  for line in claim_section(claim, outcomes[claim["id"]], results)]
    lines += ["## Questions of our own", "", QUESTIONS, ""]
    lines += [line for question in table["question"]
              for line in claim_section(question, judge(question, results, calculation_of(results)),
                                        results)]
    lines += ["## Studies", ""] + study_rows(table, results) + [""]
    lines += [*FAILING.splitlines(), "", *failing_tables(results), BORDERS_PICTURE, ""]
    lines += ["## Losses", "", LOSSES, ""]
    lines += loss_grids(results)
    machines = sorted({f"{found['machine']['processor']}, {found['machine'].get('compiler', '')}"
                       for found in results.values() if "machine" in found})
    lines += [f"Machine: {'; '.join(machines)}.", ""] if machines else []
    lines += [line for name in repro.studies() if (here / f"{name}.png").exists()
              for line in (f"![{name}: loss]({name}.png)", "")]
    lines += score_lines()
    lines += FULL.format(share=100 * SHARE, peak=PEAK / 1e12, affordable=AFFORDABLE,
                         one=ONE_GPU / 1e9, scored=SCORED / 1e9).splitlines()
    for claim in table["claim"] + table["question"]:
        if "model" in claim.get("full", {}):
            lines += [f"| {claim['id']} | `{command}` | {runs} | {hours(cost)} |"
                      for command, runs, cost in full_scale(claim, table["models"])]
        elif "full" in claim:
            full = claim["full"]
            extra = f", with `{full['extra']}`" if "extra" in full else ""
            lines.append(f"| {claim['id']} | the runs of {full['as']}{extra} | | |")
        else:
            lines.append(f"| {claim['id']} | a calculation, or a count: nothing larger to "
                         "run | | |")
    return "\n".join(lines) + "\n"


def save(chart, path, dpi):
    """Whole or not at all: half a picture would look newer than its results."""
    new = path.with_suffix(".new")
    chart.tight_layout()
    chart.savefig(new, format="png", dpi=dpi, metadata={"Software": None})
    os.replace(new, path)


def draw_tuned(results, study, path):
    """Validation losses of each placement, optimizers side by side, each at its best rate: a dot
    for a seed, a line for their mean."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    functions, axes = statistic.Functions(results, study), results[study]["axes"]
    chart, pane = plt.subplots(figsize=(5.6, 3.2))
    for i, optimizer in enumerate(axes["optimizer"]):
        for j, mode in enumerate(axes["mode"]):
            losses = list(functions.tuned(mode, study, optimizer=optimizer).values())
            x = j + 0.3 * (i - 0.5)
            pane.plot([x] * len(losses), losses, "o", color=f"C{i}", markersize=3.5,
                      label="" if j else optimizer)
            pane.plot([x - 0.12, x + 0.12], [np.mean(losses)] * 2, color=f"C{i}", linewidth=1.5)
    pane.set_xticks(range(len(axes["mode"])), axes["mode"], fontsize=8)
    pane.set_ylabel("validation loss, nats per byte", fontsize=8)
    pane.tick_params(axis="y", labelsize=7)
    pane.set_title(f"{results[study]['flags']['layers']} layers on real text, each at its best "
                   "rate; a dot for a seed, a line for the mean", fontsize=8)
    pane.legend(fontsize=8, frameon=False)
    save(chart, path, 100)
    plt.close(chart)


def leads_on_pre(found):
    """Arm -> steps, validation losses less PRE's with the same seed (one row a seed), and the mean
    of the last losses. An arm ends where its first run ends, or has a validation that is not
    finite; runs without a validation are left out."""
    arms = {}
    for run in found["runs"]:
        arm = run["axes"]["mode"], run["axes"]["init"]
        finite = itertools.takewhile(lambda line: line[1] is not None, run["validations"])
        arms.setdefault(arm, {})[run["axes"]["seed"]] = list(finite)
    base, leads = arms.get(("PRE", "auto"), {}), {}
    for (mode, init), runs in arms.items():
        seeds = [seed for seed in runs if runs[seed] and base.get(seed)]
        if seeds:
            length = min(len(losses[seed]) for seed in seeds for losses in (runs, base))
            own, pre = (np.array([losses[seed][:length] for seed in seeds])
                        for losses in (runs, base))
            leads[mode if init == "auto" else f"{mode}, {init.capitalize()}"] = (
                own[0, :, 0], own[:, :, 1] - pre[:, :, 1], own[:, -1, 1].mean())
    return leads


def draw_leads(found, path):
    """Leads on PRE over the bytes that were seen; bands from the lowest to the highest seed, names
    and last losses where the lines end."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    flags = found["flags"]
    millions = int(flags["batch"]) * int(flags["seq"]) / 1e6           # bytes a step
    chart, pane = plt.subplots(figsize=(4.6, 3.6))
    names = []                                                         # place, text, color
    arms = leads_on_pre(found)
    for i, (arm, (steps, leads, end)) in enumerate(arms.items()):
        color = f"C{i - 1}" if i else "black"                          # PRE is the first
        pane.plot(millions * steps, leads.mean(0), color, linewidth=1.5)
        pane.fill_between(millions * steps, leads.min(0), leads.max(0), color=color, alpha=0.15,
                          linewidth=0)
        names.append((leads.mean(0)[-1], f"{arm} {end:.3f}", color))
    bottom = min(leads.min() for _, leads, _ in arms.values()) - 0.01
    top = min(pane.get_ylim()[1], 0.1)                                 # a collapse leaves the axes
    pane.set_ylim(bottom, top)
    place = -np.inf
    for last, text, color in sorted(names):                            # none on top of another
        place = max(place + 0.05 * (top - bottom), min(last, top))
        pane.annotate(text, (1.01, place), xycoords=("axes fraction", "data"), color=color,
                      fontsize=8, va="center")
    pane.set_xlabel("million bytes seen", fontsize=8)
    pane.set_ylabel("validation loss less PRE's, nats per byte", fontsize=8)
    pane.tick_params(labelsize=7)
    pane.spines[["top", "right"]].set_visible(False)
    pane.set_title(f"{flags['layers']} layers of width {flags['width']} on real text: below PRE's "
                   "line is better\n(with the name: the loss at the end)", fontsize=8)
    save(chart, path, 150)
    plt.close(chart)


BORDERS = ("SPAN", "POST", "HYBRID", "MIX_LN", "POST_SHIFTED")          # that are drawn


def draw_borders(results, path):
    """The rate that kills a run over the layers, one panel a width: a bar from the largest rate
    that no run failed at to the smallest that one did. PRE, whose runs never failed: the highest
    rate tried."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    pairs = usual_runs(results)
    if "PRE" not in pairs:
        return
    chart, panes = plt.subplots(1, 2, figsize=(7.6, 3.6), sharey=True)
    for pane, width in zip(panes, (SMALL, LARGE)):
        tried = {depth: low for depth, (low, first) in borders(pairs["PRE"], width).items()
                 if not first}
        pane.plot([*tried], [*tried.values()], "^", color="black", markersize=5,
                  label="PRE: highest tried, none failed")
        for color, mode in enumerate(BORDERS):
            bars = [(depth, *ends) for depth, ends in borders(pairs.get(mode, []), width).items()
                    if all(ends)]
            depth, low, high = np.reshape(bars, (-1, 3)).astype(float).T
            depth *= 1.015 ** (color - 2)                              # no bar behind another
            middle = np.sqrt(low * high)
            pane.errorbar(depth, middle, [middle - low, high - middle], color=f"C{color}",
                          label=mode, linewidth=1.2, elinewidth=3, alpha=0.8)
        pane.set_xscale("log", base=2)
        pane.set_yscale("log")
        pane.set_xticks([4, 8, 16, 32, 64, 128], ["4", "8", "16", "32", "64", "128"])
        pane.set_xlabel("layers", fontsize=8)
        pane.set_title(f"width {width}", fontsize=9)
        pane.tick_params(labelsize=7)
    panes[0].set_ylabel("peak learning rate", fontsize=8)
    panes[1].legend(fontsize=7, frameon=False)
    save(chart, path, 110)
    plt.close(chart)


def write(table, here, pictures=True):
    import repro
    results = repro.read_results()
    if pictures:
        draw_borders(results, here / "failing.png")
        for name, keep in table["keep"].items():
            if "tuned" in keep and not any(map(repro.missing, (name, f"{name}_seeds"))):
                draw_tuned(results, name, here / f"{name}.png")
            if "leads" in keep and results.get(name, {}).get("runs"):
                draw_leads(results[name], here / f"{name}.png")
    (here / "RESULTS.md").write_text(render(table, here, results))
    print(f"wrote {here / 'RESULTS.md'}")
