"""RESULTS.md and its pictures, from claims.toml and results/. No judgement is made here: the
verdicts are statistic.py's."""
import collections
import itertools
import pathlib
import shlex

import numpy as np

import statistic
from ablation.study import read_json

PAPERS = {"S": "SpanNorm (S), and its earlier version FuseNorm (F)", "H": "HybridNorm",
          "D": "Scale-Distribution Decoupling (SDD)"}
ORDER = (statistic.AGREES, statistic.DISAGREES, statistic.OPEN, statistic.SIGN, statistic.WAITING,
         statistic.ELSEWHERE)
# bf16 of an H100 or H200, dense, FLOP/s; the part of it that is counted on
PEAK, SHARE = 989e12, 0.4
# parameters up to which a run is given to one GPU, at 16 bytes for weight, gradient and AdamW
ONE_GPU = 4e9
AFFORDABLE = 200                              # GPU hours of a run up to which it gets three seeds


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


def ablate_command(full, model, tokens, words, seeds, name):
    """One run for each GPU at a time."""
    words = f"--tokens {tokens:.0f} {words} --seed {','.join(seeds)}".replace("  ", " ")
    return (f"python3 dev/ablate.py --mode {full['mode']} --model {model} --data DATA {words} "
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
             f"--steps {steps} {flags}--out {out} --resume auto")
    return (f"{loops}make -s train_gpt NORM_MODE=$mode && {train}{'; done' * len(several)}"
            + (f"; python3 dev/probe.py runs/{name}-*" if "probe" in axes else ""))


def full_scale(claim, models):
    """[(command, runs, GPU hours of all), ...]"""
    full, found = claim["full"], []
    flags = full["flags"] if isinstance(full["flags"], list) else [full["flags"]]
    # tokens of each model, or one number for all
    given = full["tokens"] if isinstance(full["tokens"], list) else itertools.repeat(full["tokens"])
    for (model, tokens), (number, words) in itertools.product(zip(full["model"].split(","), given),
                                                              enumerate(flags, 1)):
        parameters, batch, layers, everything = models[model]
        axes = dict(mode=full["mode"].split(","), **flag_values(words))
        sizes = [parameters * int(depth) / layers for depth in axes.get("layers", [layers])]
        arms = int(np.prod([len(values) or 1 for values in axes.values()]))
        one = gpu_hours(float(np.mean(sizes)), tokens)
        alone = everything * max(sizes) / parameters <= ONE_GPU
        seeds = ["1", "2", "3"] if one <= AFFORDABLE and alone else ["1"]
        name = (claim["id"] + (f"-{model}" if "," in full["model"] else "")
                + (f"-{number}" if len(flags) > 1 else ""))
        command = (ablate_command(full, model, tokens, words, seeds, name)
                   if alone else torchrun_command(model, round(tokens / batch), axes, name))
        found.append((command, arms * len(seeds), arms * len(seeds) * one))
    return found


def hours(value):
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


# ----------------------------------------------------------------------------------------- verdicts

Outcome = collections.namedtuple("Outcome", "verdict rows read why")


def judge(claim, results, calculation):
    """A claim's verdict, its figures, and the runs they are made of."""
    if "expect" not in claim:
        return Outcome(statistic.ELSEWHERE, [], [], claim["needs"])
    try:
        rows, read = statistic.evaluate(claim, results, calculation)
    except statistic.Waiting as reason:
        return Outcome(statistic.WAITING, [], [], str(reason))
    return Outcome(statistic.verdict([side for _, _, side, _ in rows if side]), rows, read, "")


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


def figure(what, seeds, side, wanted):
    """One part of a claim, as text: what it is, the figure with its interval, what was expected,
    and on which side it came out."""
    if wanted in ("always", "never") or wanted is None and set(seeds.values()) <= {0.0, 1.0}:
        text = f"{what}: {sum(map(bool, seeds.values()))} of {len(seeds)}"
    else:
        found = statistic.interval(seeds)
        text = f"{what}: {number(found.mean)}"
        if found.low != found.high:
            text += f" ({number(found.low)} to {number(found.high)})"
    if wanted and wanted != "sign":
        if wanted.startswith("in "):
            wanted = "between " + " and ".join(wanted.split()[1:])
        text += f"; expected {wanted}: {side.replace(' at this scale', '')}"
    return text


def cell(text):
    return text.replace("|", "\\|").replace("<", "&lt;")


# ----------------------------------------------------------------------------------------- the page

def claim_row(claim, outcome):
    drawn = max(([*seeds] for _, seeds, _, _ in outcome.rows), key=len, default=[])
    seeds = ("exact" if drawn == ["exact"]
             else f"{len(drawn)} {'rounds' if claim.get('study') == 'timing' else 'seeds'}")
    parts = [cell(figure(*row)) if row[3] else "*" + cell(figure(*row)) + "*"
             for row in outcome.rows]
    where = {"calculations": "[calculations](calculations.py)",
             "timing": "`--timing`"}.get(claim.get("study"),
                                         f"[{claim.get('study')}]({claim.get('study')}.toml)")
    if outcome.verdict == statistic.WAITING and claim["study"] == "timing":
        here = ("`python3 dev/repro/repro.py --timing`, six minutes of a machine with nothing "
                "else to do")
    elif outcome.verdict == statistic.WAITING:
        here = (f"{where} waits for {outcome.why}: `python3 dev/repro/repro.py "
                f"{' '.join([claim['study'], *claim.get('reads', [])])}`")
    elif outcome.verdict == statistic.ELSEWHERE:
        here = f"{cell(outcome.why)}; command and cost are in the last table"
    else:
        here = "<br>".join(parts) + f"<br>{where}, {seeds}"
    failing = [what for what, _, side, _ in outcome.rows if side == statistic.DISAGREES]
    verdict = f"**{outcome.verdict}**" + (f": {cell('; '.join(failing))}"
                                          if failing and len(claim["expect"]) > 1 else "")
    paper = cell(claim["paper"]) + (f"<br>*{cell(claim['trap'])}*" if claim.get("trap") else "")
    return (f"| {claim['id']} | {cell(claim['claim'])} <br>{cell(claim['where'])} | {paper} | "
            f"{here} | {verdict} |")


def counts(outcomes):
    lines = ["| | " + " | ".join(ORDER) + " | all |", "|---" * (len(ORDER) + 2) + "|"]
    for paper in [*PAPERS, ""]:
        found = collections.Counter(outcome.verdict for name, outcome in outcomes.items()
                                    if name.startswith(paper))
        cells = " | ".join(str(found[verdict]) for verdict in ORDER)
        lines.append(f"| {PAPERS.get(paper, 'all')} | {cells} | {sum(found.values())} |")
    return lines


def scale_of(found):
    flags = dict(found["flags"], **{axis: ", ".join(values) for axis, values in found["axes"]
                                    .items() if axis not in ("mode", "seed")})
    words = [f"{flags[name]} {what}" for name, what in (("layers", "layers"), ("width", "wide"),
                                                        ("steps", "steps")) if name in flags]
    if "batch" in flags and "seq" in flags:
        words.append(f"of {int(flags['batch']) * int(flags['seq'])} tokens")
    return (", ".join(words).replace("steps, of", "steps of")
            + (f"; rates {flags['lr']}" if "lr" in flags else "")
            + f"; seeds {', '.join(found['axes']['seed'])}")


def study_rows(table, here, results):
    import repro
    lines = ["| study | claims | scale | runs | minutes of a core, expected | spent |",
             "|---|---|---|---|---|---|"]
    for name in repro.studies():
        claims = ", ".join(claim["id"] for claim in repro.claims_of(table, name))
        found, axes = results.get(name), repro.read_study(name)
        several = {axis: values for axis, values in axes.items()
                   if len(values) > 1 or axis in ("mode", "seed")}
        fixed = {axis: values[0] for axis, values in axes.items() if axis not in several}
        described = scale_of({"axes": several, "flags": fixed})
        total = int(np.prod([len(values) for values in axes.values()]))
        ended = found["runs"] if found else []
        spent = f"{sum(run['seconds'] or 0 for run in ended) / 60:.1f}" if ended else ""
        commits = ", ".join(sorted({run["commit"] for run in ended}))
        runs = f"{len(ended)} of {total}" + (f", commit {commits}" if ended else "")
        lines.append(f"| [{name}]({name}.toml) | {claims} | {described} | {runs} | "
                     f"{repro.stated_minutes(name):.1f} | {spent} |")
    return lines


def arm_text(runs):
    """One arm: the mean, the lowest and the highest loss of the seeds that did not fail, and how
    many failed."""
    losses = [run["loss"] for run in runs if not statistic.failed(run)]
    failed = sum(map(statistic.failed, runs))
    text = f"{np.mean(losses):.3f} ({min(losses):.3f} to {max(losses):.3f})" if losses else ""
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
        if not found or int(found["flags"]["steps"]) == 1:
            continue
        axes = found["axes"]
        others = [axis for axis in axes if axis not in ("lr", "seed")]
        rates = axes.get("lr", [None])
        heads = others + [f"rate {rate or found['flags'].get('lr', '')}" for rate in rates]
        lines += [f"**{name}**", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for arm in itertools.product(*(axes[axis] for axis in others)):
            losses = [arm_text(runs_with(found, dict(zip(others, arm), lr=rate))) for rate in rates]
            lines.append("| " + " | ".join([*arm, *losses]) + " |")
        lines.append("")
    return lines


HEAD = """# What reproduces at small scale

Written by `python3 dev/repro/repro.py` from [claims.toml](claims.toml) and [results/](results/);
`--table` writes it again without runs. {count} claims of four papers, each with a figure and a
predicted side that were written down before the figure was looked at. **A claim agrees if the 95 %
interval lies wholly on the predicted side, disagrees if wholly on the other, and is not resolved at
this scale otherwise.** Several parts of a claim must all agree; one that disagrees is enough.
Nobody marks anything by eye.

Figures are means over seeds with 95 % t intervals. Arms with the same seed are pairs (the same data
in the same order, the same bits in common weights): differences are taken seed by seed. Losses are
nats per byte of the built-in stories at the end of the run, validation, each arm at its best rate
of the study's grid unless the row names one. A run *fails* if it diverges or ends above 0.98 of the
entropy of the bytes' frequencies (collapsed); one that diverged counts with that entropy in means.
Further measurements, and remarks on possible flaws, stand in italics and have no say. Models here
have widths of 32 to 128 and see less than a tenth of a million tokens each: a disagreement is one
with this scale, not with the paper's.

Intervals are for one comparison each, and there are {parts} of them: where there is nothing to see,
one in twenty still lies wholly on one side.
"""

FULL = """## At the papers' scale

Hours of one H100 or H200: 6 operations for each active parameter and token, at {share:.0f} % of
{peak:.0f} TFLOP/s. Three seeds where a run takes at most {affordable} of them. DATA is a folder of
shards; data/get.py makes them of other text and GPT-2's tokens (add `--vocab 50257`), which
compares placements with each other, not with the papers' figures. Models above {one:.0f}B
parameters in all go over the eight GPUs of a node. None of this has been run.

| claim | command | runs | GPU hours |
|---|---|---|---|"""


def render(table, here):
    import repro
    results = {path.stem: read_json(path) for path in sorted((here / "results").glob("*.json"))}
    outcomes = {claim["id"]: judge(claim, results, calculation_of(results))
                for claim in table["claim"]}
    ended = [run for name, found in results.items() for run in found.get("runs", [])]
    parts = sum(len(claim.get("expect", [])) for claim in table["claim"])
    lines = HEAD.format(count=len(table["claim"]), parts=parts).splitlines()
    lines += [""] + counts(outcomes)
    total = sum(repro.stated_minutes(name) for name in repro.studies())
    lines += ["", f"{len(ended)} runs so far, "
                  f"{sum(run['seconds'] or 0 for run in ended) / 3600:.2f} hours of their own time "
                  "(a core that others were using too, where more was spent than expected). All of "
                  f"them: {total / 60:.1f} hours of one core.", ""]
    for letter, paper in PAPERS.items():
        lines += [f"## {paper}", "", "| | claim | the paper | here | verdict |",
                  "|---|---|---|---|---|"]
        lines += [claim_row(claim, outcomes[claim["id"]]) for claim in table["claim"]
                  if claim["id"].startswith(letter)] + [""]
    lines += ["## Studies", ""] + study_rows(table, here, results) + [""]
    lines += ["## Losses", "", "At the end of the runs: the mean of the seeds that did not fail, "
                               "the lowest and the highest of them. Compare rows by the claims' "
                               "intervals, which pair seeds.", ""]
    lines += loss_grids(results)
    machines = sorted({f"{found['machine']['processor']}, {found['machine'].get('compiler', '')}"
                       for found in results.values() if "machine" in found})
    lines += [f"Machine: {'; '.join(machines)}.", ""] if machines else []
    lines += [line for name in repro.studies() if (here / f"{name}.png").exists()
              for line in (f"![{name}: training loss]({name}.png)", "")]
    lines += FULL.format(share=100 * SHARE, peak=PEAK / 1e12, affordable=AFFORDABLE,
                         one=ONE_GPU / 1e9).splitlines()
    for claim in table["claim"]:
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


def draw(name, found, path):
    """Training loss over steps, one panel for each value of what is neither placement nor rate nor
    seed; bands from the lowest to the highest seed, at the rate that ends lowest."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    axes = found["axes"]
    others = [axis for axis in axes if axis not in ("mode", "lr", "seed")]
    panels = list(itertools.product(*(axes[axis] for axis in others)))
    chart, panes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels) + 0.8, 3), sharey=True,
                                squeeze=False)
    for panel, pane in zip(panels, panes[0]):
        for mode in axes["mode"]:
            rates = [runs_with(found, dict(zip(others, panel), mode=mode, lr=rate))
                     for rate in axes.get("lr", [None])]
            runs = min(filter(None, rates),
                       key=lambda runs: np.mean([statistic.cost(run) for run in runs]), default=[])
            length = min((len(run["drawn"]) for run in runs), default=0)
            if length:
                values = np.array([[np.nan if loss is None else loss
                                    for _, loss in run["drawn"][:length]] for run in runs])
                steps = [step for step, _ in runs[0]["drawn"][:length]]
                line, = pane.plot(steps, np.nanmean(values, axis=0), label=mode, linewidth=1.2)
                pane.fill_between(steps, np.nanmin(values, axis=0), np.nanmax(values, axis=0),
                                  color=line.get_color(), alpha=0.15, linewidth=0)
        pane.set_title(", ".join(f"{axis} {value}" for axis, value in zip(others, panel)) or name,
                       fontsize=9)
        pane.set_xlabel("step", fontsize=8)
        pane.tick_params(labelsize=7)
    panes[0][0].set_ylabel("training loss, nats per byte", fontsize=8)
    panes[0][-1].legend(fontsize=7, frameon=False)
    chart.tight_layout()
    chart.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(chart)


def write(table, here, pictures=True):
    for name in table["keep"]:
        found, path = read_json(here / "results" / f"{name}.json"), here / f"{name}.png"
        newer = (found and path.exists()
                 and path.stat().st_mtime >= (here / "results" / f"{name}.json").stat().st_mtime)
        if pictures and found and "picture" in table["keep"][name] and not newer:
            draw(name, found, path)
    (here / "RESULTS.md").write_text(render(table, here))
    print(f"wrote {here / 'RESULTS.md'}")
