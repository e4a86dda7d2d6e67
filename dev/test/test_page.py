#!/usr/bin/env python3
"""Tests of dev/ablation/pictures.py, inside.py and page.py: python3 dev/test/test_page.py [NAME...]

Draws made-up studies, friendly and hostile, and opens their pages in headless Chromium, 1200 pixels
wide and 390, as a phone, with every request of the browser caught by this program.
Needs numpy, scipy, matplotlib, and Chromium or Chrome. No network; half a minute.
"""
import base64
import html
import html.parser
import http.server
import io
import itertools
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
from PIL import Image
from matplotlib import image
from matplotlib.text import Text

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import plot
from ablation import inside, page, pictures, stats
from ablation.study import COLLAPSED, DIVERGED, FAILED, FINISHED, KILLED, WAITING, Run, Study

WIDE, NARROW, HEIGHT = 1200, 390, 8000                     # pixels of a screenshot
# requests of the browser itself; those of a page it lists besides
BROWSERS_OWN = re.compile(r"^(http://)?[\w.-]+\.(google|googleapis|gvt1)\.com[:/]")
VOID = {"meta", "img", "br", "hr", "link", "input"}
passed = failed = 0
scratch = pathlib.Path(tempfile.mkdtemp(prefix="test_page_"))


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {sys._getframe(1).f_code.co_name}:{sys._getframe(1).f_lineno}: {what}")


# ---- studies

def made_up_log(r, level, layers, lr, steps, floor=0.24):
    """A log as the trainer writes it: losses that fall towards a limit, later levels a little
    lower, and diagnostics of all layers."""
    lines, limit = [], 1.6 - 0.05 * level + 0.1 * abs(np.log(lr / 4e-3)) + r.gauss(0, 0.01)
    for step in range(1, steps + 1):
        loss = limit + 4 * np.exp(-step / 20) + 1 / (1 + step / 40) + r.gauss(0, 0.05)
        lines.append({"step": step, "loss": loss, "above_floor": loss - floor, "lr": lr,
                      "grad_norm": 1.0, "tokens": 1024 * step, "ms": 12.5})
        if step == 1 or step % (steps // 20) == 0:
            names = [f"model.layers.{i}.{part}_proj.weight" for i in range(layers)
                     for part in ("self_attn.q", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")]
            fade = lambda name: 10 ** (-0.004 * level * step * (layers - int(name.split(".")[2]))
                                       / layers + r.gauss(0, 0.05))
            lines.append({
                "step": step, "residual_rms": [1 + 0.3 * i * (level == 0) for i in range(layers)],
                "attn_ratio": [0.3 / (1 + i) for i in range(layers)],
                "ffn_ratio": [0.5 + 0.1 * level] * layers,
                "attn_logit_max": [5 + r.random() for _ in range(layers)],
                "grad_norms": dict({name: 0.3 * fade(name) for name in names},
                                   **{"model.embed_tokens.weight": 0.5, "model.norm.weight": None}),
                "update_ratios": {name: 1e-3 * (1 + level) * r.uniform(0.8, 1.2)
                                  for name in names}})
        if step % (steps // 5) == 0:
            lines.append({"step": step, "val_loss": loss + 0.02,
                          "val_above_floor": loss + 0.02 - floor, "weights": "0123456789abcdef"})
    return lines


def made_up_study(name, axes, compare="mode", tune=None, fate=lambda axes: FINISHED, steps=200):
    """A study with a run for each combination; fate: axes -> how it ended. A waiting run
    has no log; one that diverged, failed or was killed has half of one."""
    r, runs, folder = random.Random(name), [], scratch / name
    for values in itertools.product(*axes.values()):
        one = dict(zip(axes, values))
        words = [word for axis, value in one.items() for word in ("--" + axis, value)]
        run = Run("-".join(values), one, folder / "runs" / str(len(runs)),
                  ["bin/" + one["mode"]] + words)
        run.status, layers = fate(one), int(one.get("layers", "6"))
        if run.status != WAITING:
            run.exit, run.seconds = {FINISHED: 0, COLLAPSED: 0, DIVERGED: 3, FAILED: 1,
                                     KILLED: -9}[run.status], 600
            run.config = {"norm_mode": one["mode"], "initialization": "scale", "parameters": 1000,
                          "flops_per_token": 6000,
                          "flags": {"layers": str(layers), "decay_gains": "off",
                                    "final_norm": "auto", "tied": "off"}}
            run.log = made_up_log(r, axes[compare].index(one[compare]), layers,
                                  float(one.get("lr", "4e-3")), steps)
            run.folder.mkdir(parents=True)
            (run.folder / "output.txt").write_text("many words\n" * 20
                                                   + f"the last line of {run.name}\n")
        if run.status in (DIVERGED, FAILED, KILLED):
            run.log = run.log[:len(run.log) // 2] + [{"step": steps // 2 + 1, "loss": None}]
        runs.append(run)
    folder.mkdir(exist_ok=True)
    return Study(folder, axes, {"width": "64", "steps": str(steps)}, "python3 dev/ablate.py --out "
                 + name, {"processor": "a made-up one", "cores": "2"},
                 compare, tune, runs, tokens_per_step=1024)


def set_final_losses(study, losses):
    """losses: level -> the final loss of each seed, in their order."""
    for level, values in losses.items():
        for run, loss in zip((run for run in study.runs if run.axes[study.compare] == level),
                             values):
            for line in run.log:
                if "val_loss" in line:
                    line.update(val_loss=loss, val_above_floor=loss - 0.24)


# ---- drawing, and looking at what was drawn

def boxes_of(figure, axes):
    """The boxes of the texts around one plot that are seen: titles, ticks inside the axes' range,
    labels, notes."""
    frame, found = axes.get_window_extent(), []
    for axis, edges in ((axes.xaxis, (frame.x0 - 1, frame.x1 + 1)),
                        (axes.yaxis, (frame.y0 - 1, frame.y1 + 1))):
        for label in axis.get_ticklabels():
            box = label.get_window_extent()
            middle = (box.x0 + box.x1) / 2 if axis is axes.xaxis else (box.y0 + box.y1) / 2
            found += [(label, box)] if edges[0] <= middle <= edges[1] else []
        found.append((axis.label, axis.label.get_window_extent()))
    found += [(text, text.get_window_extent())
              for text in (axes.title, axes._left_title, axes._right_title, *axes.texts)]
    return [(text, box) for text, box in found if text.get_text() and text.get_visible()]


def check_layout(figure):
    """Texts of 8 points or more, inside the picture, beside each other."""
    whole, seen = figure.bbox.padded(1), []
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    for axes in (axes for axes in figure.axes if axes.get_visible() and axes.axison):
        seen += boxes_of(figure, axes)
    seen += [(text, text.get_window_extent()) for text in legends]
    small = [text.get_text() for text, _ in seen if text.get_fontsize() < 8]
    outside = [text.get_text() for text, box in seen if box.x0 < whole.x0 or box.y0 < whole.y0
               or box.x1 > whole.x1 or box.y1 > whole.y1]
    meeting = [(a.get_text(), b.get_text())
               for (a, one), (b, other) in itertools.combinations(seen, 2)
               if one.padded(-1).overlaps(other.padded(-1))]
    return small, outside, meeting


def check_picture(figure, path):
    small, outside, meeting = check_layout(figure)
    what, pixels = f"{path.parent.name}/{path.name}", image.imread(path)
    dark, size = np.mean(pixels[..., :3].min(-1) < 0.5), path.stat().st_size
    expect(not small, f"{what}: below 8 points: {small}")
    expect(not outside, f"{what}: outside of the picture: {outside}")
    expect(not meeting, f"{what}: over each other: {meeting[:5]}")
    expect(pixels.shape[1] == 990 and dark > 0.002 and size < 200e3,
           f"{what}: {pixels.shape}, {dark:.4f} of it dark, {size} bytes")


def draw(study):
    """Rows and pictures of a study, drawn into its folder, and the figures; checks how each is laid
    out."""
    saved.clear()
    rows = stats.summarize(study)
    drawn = pictures.draw(study, rows, study.folder)
    expect(len(saved) == len(drawn), f"{study.folder.name}: {len(saved)} saved, {len(drawn)} named")
    for (name, title, caption), figure in zip(drawn, saved):
        check_picture(figure, study.folder / name)
        expect(len(title) > 3 and caption.endswith("."),
               f"{study.folder.name}/{name}: {title}: {caption}")
    return rows, drawn, list(saved)


def draw_inside(study):
    """The same of what models do inside."""
    saved.clear()
    drawn = inside.draw(study, stats.summarize(study), study.folder)
    expect(len(saved) == len(drawn), f"{study.folder.name}: {len(saved)} saved, {len(drawn)} named")
    for (name, title, caption), figure in zip(drawn, saved):
        check_picture(figure, study.folder / name)
        expect(len(title) > 2 and caption.endswith("."),
               f"{study.folder.name}/{name}: {title}: {caption}")
    return drawn, {name: figure for (name, *_), figure in zip(drawn, saved)}


def made_up_probe(r, layers, width=24, dense=True):
    """As dev/probe.py writes it; dense: the ffn has no experts."""
    numbers = lambda count, there=True: [r.uniform(0.1, 0.9) if there else None
                                         for _ in range(count)]
    cosine = lambda i, j: 1 - 0.02 * abs(i - j) - (i != j) * r.uniform(0, 0.01)
    return {"layers": layers,
            "similarity": [[cosine(i, j) for j in range(layers)] for i in range(layers)],
            "similarity_by_distance": sorted(numbers(layers), reverse=True),
            "hard_rank": {site: numbers(layers, dense) for site in ("hidden", "up")},
            "soft_rank": {site: numbers(layers, dense) for site in ("hidden", "up")},
            "edr_harmonic": dict(zip(("hidden", "up"), numbers(2, dense))),
            "edr_geometric": dict(zip(("hidden", "up"), numbers(2, dense))),
            "embedding_spectrum": {kind: [100 / (1 + i * r.uniform(0.9, 1.1)) for i in range(width)]
                                   for kind in ("gram", "centred")},
            "condition": {part: [10 ** x if dense else None for x in numbers(layers)]
                          for part in ("gate", "up", "fused", "down")},
            "residual_rms": numbers(layers + 1), "gradient_rms": numbers(layers + 1)}


def draw_one(picture, study):
    picture(study, stats.summarize(study), study.folder / "one.png")
    check_picture(saved[-1], study.folder / "one.png")
    return saved[-1]


def words_in(figure):
    return "\n".join(text.get_text() for text in figure.findobj(Text))


# ---- HTML

class Outline(html.parser.HTMLParser):
    """Tags, attributes and text of a page, and what is wrong with how the tags are nested."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.wrong, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        self.wrong += [f"<{tag}> stays open" for tag in self.open]
        self.text = "".join(self.words)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag in ("p", "h1", "h2", "table", "figure", "dl", "pre", "details",
                   "div") and "p" in self.open:
            self.wrong.append(f"<{tag}> in a paragraph")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(f"</{tag}> closes nothing")

    def handle_data(self, text):
        self.words.append(text if "style" not in self.open else "")


def write_page(study, rows, drawn, warnings=()):
    path = study.folder / "index.html"
    page.write_page(study, rows, list(warnings), drawn, path)
    raw = path.read_bytes()
    outline = Outline(raw.decode("utf-8"))
    name = study.folder.name
    expect(raw.startswith(b"<!DOCTYPE html>\n<html lang=\"en\">")
           and not re.search(rb"[\x00-\x09\x0b-\x1f\x7f]", raw),
           f"{name}: how it begins, and no control characters")
    expect(not outline.wrong, f"{name}: {outline.wrong[:5]}")
    expect({"html", "head", "title", "style", "body", "h1", "table"} <= set(outline.tags),
           f"{name}: {set(outline.tags)}")
    expect(not set(outline.tags) & {"script", "link", "iframe", "object", "embed", "base", "form",
                                    "svg"}, f"{name}: {set(outline.tags)}")
    expect(not [a for a in outline.attributes if a[1].startswith("on")
                or a[1] in ("style", "href", "srcset")], f"{name}: attributes that act")
    sources = [a[2] for a in outline.attributes if a[1] == "src"]
    expect(len(sources) == len(drawn) and all(source.startswith("data:image/png;base64,")
                                              for source in sources),
           f"{name}: {len(sources)} pictures for {len(drawn)}")
    for source, (file, *_) in zip(sources, drawn):
        data = base64.b64decode(source.partition(",")[2], validate=True)
        expect(data == (study.folder / file).read_bytes()
               and image.imread(io.BytesIO(data)).ndim == 3, f"{name}: {file} is in it")
    alts = [a[2] for a in outline.attributes if a[1] == "alt"]
    expect(len(alts) == len(drawn) and all(alts), f"{name}: {alts}")
    expect("url(" not in page.STYLE and "@import" not in page.STYLE,
           f"{name}: the style asks for more")
    return outline


# ---- the browser

class Proxy(http.server.BaseHTTPRequestHandler):
    """All that the browser asks for comes here; it gets the files of the studies."""
    asked = []

    def log_message(self, *args):
        pass

    def do_GET(self):
        Proxy.asked.append(self.path)
        host, _, path = self.path.removeprefix("http://").partition("/")
        file = scratch / path
        body = file.read_bytes() if host == "studies.test" and file.is_file() else b""
        self.send_response(200 if body else 404)
        self.send_header("Content-Type", "text/html; charset=utf-8"
                         if file.suffix == ".html" else "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_HEAD = do_CONNECT = do_GET


FRAMES = """<!DOCTYPE html><meta charset="utf-8">
<style>iframe { position: absolute; top: 0; border: 0; }</style>
<body style="margin:0"><pre id="found" style="display:none"></pre>
<iframe src="index.html" style="left:0;width:%dpx;height:%dpx"></iframe>
<iframe src="index.html" style="left:%dpx;width:%dpx;height:%dpx"></iframe>
<script>
const measure = frame => {
  const page = frame.contentDocument;
  const box = e => {
    const r = e.getBoundingClientRect();
    return [r.left, r.top, r.width, r.height];
  };
  return {width: frame.contentWindow.innerWidth, scroll: page.documentElement.scrollWidth,
          height: page.body.getBoundingClientRect().height, title: page.title,
          asked: frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name),
          images: [...page.images].map(i => ({natural: i.naturalWidth, box: box(i)})),
          text: page.body.innerText,
          enlarged: (page.querySelector("figure div").focus(), box(page.images[0])[2]),
          after: page.documentElement.scrollWidth,
          dom: page.documentElement.outerHTML.replace(/base64,[^"]*/g, "base64,")};
};
onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(measure);
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


def browse(study):
    """The page, wide and narrow, as Chromium shows it: what a script beside it finds, and the
    picture."""
    folder, shot = study.folder, study.folder / "screen.png"
    (folder / "frames.html").write_text(FRAMES % (WIDE, HEIGHT, WIDE, NARROW, HEIGHT))
    Proxy.asked.clear()
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
               "--disable-background-networking", "--disable-dev-shm-usage",
               f"--user-data-dir={scratch}/profile",
               f"--proxy-server=http://127.0.0.1:{server.server_port}",
               "--proxy-bypass-list=<-loopback>",
               f"--window-size={WIDE + NARROW},{HEIGHT}", f"--screenshot={shot}", "--dump-dom",
               f"http://studies.test/{folder.name}/frames.html"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    found = re.search(r'<pre id="found"[^>]*>(.*?)</pre>', done.stdout, re.S)
    expect(done.returncode == 0 and found and found[1] and shot.is_file(),
           f"{folder.name}: {browser} ended with {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(html.unescape(found[1])), np.asarray(Image.open(shot).convert("RGB"))


def check_in_browser(study, drawn):
    """Both widths: pictures decoded and visible, nothing wider than the page, no request, nothing
    that runs. Returns the text."""
    found, pixels = browse(study)
    name = study.folder.name
    ours = {f"http://studies.test/{name}/{file}" for file in ("frames.html", "index.html")}
    others = [address for address in Proxy.asked if address not in ours
              | {"http://studies.test/favicon.ico"} and not BROWSERS_OWN.match(address)]
    expect(ours <= set(Proxy.asked) and not others, f"{name}: it asks for {others}")
    for left, width, view in ((0, WIDE, found[0]), (WIDE, NARROW, found[1])):
        what = f"{name}, {width} px"
        expect(view["asked"] == [], f"{what}: the page asks for {view['asked']}")
        expect(view["width"] == width and view["scroll"] <= width,
               f"{what}: the page is {view['scroll']} wide in {view['width']}")
        expect(500 < view["height"] <= HEIGHT, f"{what}: {view['height']} high")
        expect(len(view["images"]) == len(drawn)
               and all(one["natural"] == 990 for one in view["images"]),
               f"{what}: {view['images']}")
        for (file, *_), one in zip(drawn, view["images"]):
            x, y, w, h = (round(value) for value in one["box"])
            part = pixels[y:y + h, left + x:left + min(x + w, width)].min(-1)
            dark, shades = np.mean(part < 128) if part.size else 0, len(np.unique(part))
            expect(dark > 0.002 and shades > 8,
                   f"{what}: {file} at {one['box']}: {dark:.4f} dark, {shades} shades")
            expect(w >= 900 if width == WIDE else x >= 0 and x + w <= width,
                   f"{what}: {file} is {w} wide")
        expect(view["enlarged"] >= 900 and view["after"] <= width,
               f"{what}: a tap makes a picture {view['enlarged']}")
        outline = Outline(view["dom"])
        expect(not {"script", "link", "iframe", "b"} & set(outline.tags)
               and outline.tags.count("img") == len(drawn), f"{what}: {set(outline.tags)}")
        expect(not [a for a in outline.attributes if a[1].startswith("on")],
               f"{what}: attributes that act")
        expect(view["title"] == " ".join(pictures.printable(page.question(study)).split()),
               f"{what}: the title is {view['title']}")
    return found[0]["text"]


def expect_words(text, *words):
    missing = [word for word in words if word not in text]
    expect(not missing, f"{missing} in {text[:500]}")


# ---- the tests

def test_friendly():
    """Panels, a tuned rate, all kinds of ends: what the pictures and the page say, and how the page
    looks."""
    fates = {("POST", "1e-2", "1"): DIVERGED, ("POST", "1e-2", "2"): COLLAPSED,
             ("POST", "1e-2", "3"): FAILED, ("SPAN", "1e-2", "3"): KILLED}
    study = made_up_study("friendly", {"mode": ["PRE", "POST", "SPAN"], "layers": ["6", "24"],
                                       "lr": ["1e-3", "4e-3", "1e-2"], "seed": ["1", "2", "3"]},
                          tune="lr", fate=lambda one: fates.get((one["mode"], one["lr"],
                                                                 one["seed"]), FINISHED)
                          if one["layers"] == "24" else FINISHED)
    study.notes.append("a note of the study")
    rows, drawn, figures = draw(study)
    expect([name for name, *_ in drawn] == ["loss.png", "final.png", "rates.png", "norms.png",
                                            "layers.png"], f"{drawn}")
    loss, final, rates, norms, layers = figures
    expect_words(words_in(loss), "layers 6", "layers 24", "PRE", "SPAN", "nats per token",
                 "1,024 tokens", "entropy of the data, 0.240")
    expect_words(words_in(final), "better", "worse", "final loss, nats per token",
                 "difference to the baseline, nats per token", "baseline", "PRE, lr 4e-3")
    expect_words(words_in(rates), "1e-3", "4e-3", "1e-2", "collapsed or diverged", "lr",
                 "nats per token")
    expect_words(words_in(norms), "first layer", "middle layer", "last layer", "step",
                 "FFN gradient norm", "SPAN\nlayers 24")
    expect_words(words_in(layers), "residual stream", "attention branch", "ffn branch",
                 "attention logits", "update")
    expect([len(axes.lines) for axes in norms.axes] == [6, 6, 6, 24, 24, 24],
           "a line for each layer")
    shapes = [[len(line.get_xdata()) for line in axes.lines] for axes in layers.axes]
    expect(shapes == [[24] * 3] * 5 + [[]], f"a line for each mode, over 24 layers: {shapes}")
    draw_one(pictures.draw_losses, study)
    expect((study.folder / "one.png").read_bytes() == (study.folder / "loss.png").read_bytes(),
           "drawn twice, the same bytes")
    outline = write_page(study, rows, drawn, ["a warning with <angles> & more"])
    expect_words(outline.text, "Which trains best: PRE, POST or SPAN at 6 and 24 layers?",
                 "a warning with <angles> & more", "a note of the study", "best lr",
                 "difference to PRE", "steps saved", "seeds needed",
                 "python3 dev/ablate.py --out friendly", "--width 64 --steps 200",
                 "bin/SPAN --mode SPAN", "a made-up one", "of twenty, one misses",
                 "54 runs: 50 finished, 1 collapsed, 1 diverged, 1 failed, 1 killed; 9.0 hours")
    expect(all(f"the last line of {run.name}" in outline.text for run in study.runs if run.status
               not in (FINISHED, COLLAPSED)), "the last words of runs that did not finish")
    expect("the last line of PRE-6-1e-3-1" not in outline.text, "and of no other")
    expect(outline.text.count("exit status") == 3 and "POST-24-1e-2-3: failed" in outline.text,
           "how they ended")
    text = check_in_browser(study, drawn)
    expect("SPAN at 6 and 24 layers?" in text and "layers 24:" in text
           and "Each mode at its best lr" in text, text[:1000])


def test_answers():
    """The sentences and the table, for losses whose intervals are known."""
    lost = {("HYBRID", "2"): DIVERGED, ("HYBRID", "3"): DIVERGED, ("SDD", "1"): DIVERGED,
            ("SDD", "2"): COLLAPSED, ("SDD", "3"): KILLED}
    study = made_up_study("answers", {"mode": ["PRE", "SPAN", "POST", "HYBRID", "SDD"],
                                      "seed": ["1", "2", "3"]}, steps=40,
                          fate=lambda one: lost.get((one["mode"], one["seed"]), FINISHED))
    set_final_losses(study, {"PRE": (2.0, 2.1, 2.2), "SPAN": (1.96, 2.05, 2.14),
                             "POST": (2.1, 2.0, 2.2), "HYBRID": (2.5,)})
    rows = stats.summarize(study)
    said = page.answer(rows).split("; ")
    expect(said == ["SPAN ends 0.050 nats below PRE (95 % interval 0.025 to "
                    "0.075, 3 pairs of seeds)", "POST and PRE cannot be told apart (+0.000, 95 "
                                                "% interval −0.248 to +0.248, 3 pairs of seeds)",
                    "HYBRID ends 0.500 nats above PRE (one seed: no interval), and 2 of 3 runs "
                    "diverged", "SDD has no finished run (1 of 3 collapsed, 1 of 3 diverged, 1 of "
                                "3 not finished)."], f"{said}")
    expect(page.loss_text(rows[0].loss) == "2.1000 ± 0.2484" and page.loss_text(rows[3].loss)
           == "2.5000" and page.loss_text(rows[4].loss) == "–", "losses")
    expect(page.saved_text(stats.Interval(-0.12, -0.2, -0.04, 3, 0.1)) == "−12 % (−20 to −4)",
           page.saved_text(stats.Interval(-0.12, -0.2, -0.04, 3, 0.1)))
    expect([page.runs_text(row)
            for row in rows[2:]] == ["3 finished", "1 finished, 2 diverged",
                                     "0 finished, 1 collapsed, 1 diverged, 1 not finished"], "runs")
    outline = write_page(study, rows, [])
    cells = re.findall(r"<t[hd](?: [^>]*)?>(.*?)</t[hd]>",
                       (study.folder / "index.html").read_text())
    expect(cells[:6] == ["mode", "runs", "final loss", "difference to PRE (95 %)", "steps saved",
                         "seeds needed"] and len(cells) == 36, f"{cells}")
    expect(cells[14:16] == ["2.0500 ± 0.2236", "−0.050 (−0.075 to −0.025)"]
           and cells[9] == "baseline", f"{cells}")
    expect("Which trains best: PRE, SPAN, POST, HYBRID or SDD?" in outline.text, "the question")
    dead = made_up_study("baseline diverged", {"mode": ["PRE", "SPAN"], "seed": ["1"]}, steps=40,
                         fate=lambda one: DIVERGED if one["mode"] == "PRE" else FINISHED)
    said = page.answer(stats.summarize(dead))
    expect(said == "PRE has no finished run (1 of 1 diverged); SPAN and PRE have no two finished "
                   "runs of the same seed with a validation loss.", said)
    single = made_up_study("single", {"mode": ["SPAN"], "seed": ["1"]}, steps=40)
    set_final_losses(single, {"SPAN": (1.5,)})
    expect(page.answer(stats.summarize(single)) == "SPAN ends at 1.5000 nats per token.",
           page.answer(stats.summarize(single)))


def test_questions():
    """The title is the question; the answer says where the best rate is an end of the grid."""
    two, size = {"mode": ["PRE", "SPAN"]}, {"layers": ["2", "4"], "width": ["8", "16"]}
    for axes, compare, asked in (
            (two, "mode", "Does SPAN train better than PRE?"),
            ({"mode": ["SPAN"]}, "mode", "How does SPAN train?"),
            (two | size, "mode",
             "Does SPAN train better than PRE at 2 and 4 layers, width 8 and 16?"),
            ({"mode": ["PRE"], "bias": ["off", "on"]}, "bias",
             "Does bias on train better than bias off under PRE?")):
        made = Study(scratch, dict(axes, seed=["1"]), {}, "", {}, compare, None, [])
        expect(page.question(made) == asked, page.question(made))
    rates = {"mode": ["PRE", "SPAN", "POST"], "lr": ["1e-3", "2e-3", "4e-3"], "seed": ["1", "2"]}
    study = made_up_study("edges", rates, tune="lr", steps=40)
    best = {"PRE": "2e-3", "SPAN": "4e-3", "POST": "4e-3"}
    for run in study.runs:
        for line in run.log:
            if "val_loss" in line:
                line["val_loss"] = 1.0 + (run.axes["lr"] != best[run.axes["mode"]])
    said = page.answer(stats.summarize(study))
    expect(said.endswith("; the best learning rate of SPAN and POST is the highest tried, "
                         "so a better one may lie beyond."), said)
    study.axes["lr"] = ["2e-3", "4e-3"]
    expect("of PRE is the lowest tried" in page.answer(stats.summarize(study)),
           "and at the other end")
    study.axes["lr"] = ["2e-3"]
    expect("tried" not in page.answer(stats.summarize(study)), "one rate is no grid")


def test_many():
    """Eight levels with long names, in as many places as the pictures have room for; outliers; no
    validation data."""
    axes = {"mode": [f"A_RATHER_LONG_PLACEMENT_{i}" for i in range(8)],
            "width": ["32", "64", "96", "128", "160", "192"], "lr": ["1e-3", "4e-3"],
            "seed": ["1", "2"]}
    study = made_up_study("many", axes, tune="lr", steps=40, fate=lambda one: DIVERGED
                          if one["lr"] == "4e-3" else FINISHED)
    set_final_losses(study, {study.axes["mode"][7]: (90.0,) * 24})
    _, drawn, figures = draw(study)
    for name, *_ in drawn[:3]:
        image = np.asarray(Image.open(study.folder / name).convert("RGB"))
        pixels = image.astype(int).reshape(-1, 3)
        far = [np.abs(pixels - [int(color[i:i + 2], 16) for i in (1, 3, 5)]).max(-1).min()
               for color in pictures.COLORS]
        expect(max(far) <= 4, f"{name}: the eight colours are off by {far}")
    expect(any(line.get_marker() == ">" for axes in figures[1].axes for line in axes.lines),
           "what is far away is an arrow at the edge")
    looks = [pictures.look(study, level) for level in study.axes["mode"]]
    expect(all(len({str(one[key]) for one in looks}) == 8
               for key in ("color", "linestyle", "marker")), "eight levels, eight of each")
    blind = made_up_study("no validation", {"mode": ["PRE", "SPAN"], "seed": ["1", "2"]}, steps=40)
    for run in blind.runs:
        run.log = [line for line in run.log if "val_loss" not in line]
    loss, final = draw_one(pictures.draw_losses, blind), draw_one(pictures.draw_finals, blind)
    expect("no run has finished\nwith a validation loss" in words_in(final)
           and "entropy" not in words_in(loss), "no validation data: said")
    near = made_up_study("near the floor", {"mode": ["PRE"], "seed": ["1"]}, steps=40)
    for line in near.runs[0].log:
        if "val_loss" in line:
            line["val_above_floor"] = 0.3
    loss = draw_one(pictures.draw_losses, near)
    expect(any(line.get_linestyle() == ":" for line in loss.axes[0].lines)
           and "far below" not in words_in(loss), "a floor that is near is a line")


def test_nothing():
    """All diverged, nothing logged yet, nothing but nulls: the pictures and the page say so."""
    axes = {"mode": ["PRE", "SPAN"], "layers": ["2"], "lr": ["1e-3", "1e-2"], "seed": ["1", "2"]}
    dead = made_up_study("dead", axes, tune="lr", steps=40, fate=lambda one: DIVERGED)
    rows, drawn, (loss, final, rates, norms, layers) = draw(dead)
    expect("diverged" in words_in(loss) and sum(line.get_marker() == "x" for axes in loss.axes
                                                for line in axes.lines) == 4,
           "crosses, at the lowest rate")
    expect("4 of 4 diverged" in words_in(final) and "no run has finished" in words_in(final)
           and "no run has finished" in words_in(rates), words_in(final))
    outline = write_page(dead, rows, drawn)
    expect("SPAN has no finished run (4 of 4 diverged)" in outline.text
           and "8 runs: 8 diverged" in outline.text, outline.text[:1000])
    empty = made_up_study("empty", {"mode": ["PRE", "SPAN"], "seed": ["1", "2"]},
                          fate=lambda one: WAITING)
    rows, drawn, (loss, final, norms, layers) = draw(empty)
    for figure, words in ((loss, "no run has logged a step"), (final, "2 of 2 not finished"),
                          (norms, "no diagnostics"), (layers, "no diagnostics")):
        expect_words(words_in(figure), words)
    outline = write_page(empty, rows, drawn)
    expect("4 runs: 4 waiting or in work" in outline.text
           and "Runs that did not finish" not in outline.text, outline.text[:1000])
    nulls = made_up_study("nulls", {"mode": ["PRE"], "seed": ["1"]}, steps=40)
    for line in nulls.runs[0].log:
        line.update({key: [None] * len(value) if isinstance(value, list) else dict.fromkeys(value)
                     if isinstance(value, dict) else value if key == "step" else None
                     for key, value in line.items()})
    rows, drawn, _ = draw(nulls)
    write_page(nulls, rows, drawn)


def test_inside():
    """Probes and gradients by layer: means over seeds, eight levels, runs without probes or
    diagnostics, experts, hostile names."""
    r = random.Random(3)
    study = made_up_study("inside", {"mode": ["PRE", "POST", "SPAN"], "layers": ["6", "24"],
                                     "seed": ["1", "2", "3"]}, steps=200)
    for run in study.runs:
        run.probe = made_up_probe(r, int(run.axes["layers"]))
    drawn, figures = draw_inside(study)
    expect(len(drawn) == 9 and all(title.endswith(", layers 24") for _, title, _ in drawn),
           f"nine pictures of the deepest panel: {drawn}")
    means = [np.array([run.probe["similarity_by_distance"] for run in study.runs
                       if run.axes["mode"] == mode and run.axes["layers"] == "24"]).mean(0)
             for mode in study.axes["mode"]]
    lines = [line.get_ydata() for line in figures["distance.png"].axes[0].lines
             if line.get_linestyle() != "None"]
    expect(np.allclose(lines, means), "a line is the mean over the seeds")
    logs = [np.array([np.log(run.probe["gradient_rms"]) for run in study.runs if run.axes["mode"]
                      == mode and run.axes["layers"] == "24"]) for mode in study.axes["mode"]]
    lines = [line.get_ydata() for line in figures["streams.png"].axes[1].lines
             if line.get_linestyle() != "None"]
    expect(np.allclose(lines, [np.exp(log.mean(0)) for log in logs]),
           "on a logarithmic scale the geometric mean")
    band = figures["streams.png"].axes[1].collections[0].get_paths()[0].vertices
    half = 4.302652730 * logs[0][:, 0].std(ddof=1) / np.sqrt(3)
    at = band[band[:, 0] == -1][:, 1]
    expect(np.isclose(at.min(), np.exp(logs[0][:, 0].mean() - half))
           and np.isclose(at.max(), np.exp(logs[0][:, 0].mean() + half)),
           "its band is Student's 95 % interval")
    norms = [line["grad_norms"] for line in study.runs[-1].log if "grad_norms" in line][-1]
    right = [np.sqrt(sum(value ** 2 for name, value in norms.items()
                         if name.startswith(f"model.layers.{l}."))) for l in range(24)]
    expect(np.allclose(inside.norms_by_layer(norms), right),
           "the norm of all that belongs to a layer")
    right = [np.hypot(*(norms[f"model.layers.{l}.mlp.{part}_proj.weight"]
                        for part in ("gate", "up"))) for l in range(24)]
    expect(np.allclose(inside.norms_by_layer(norms, inside.GROUPS["ffn in"]), right),
           "and of a group")
    found = {name: bool(pictures.MATRIX.fullmatch(f"model.layers.0.{name}.weight")) for name in (
        "self_attn.q_proj", "self_attn.kv_a_proj_with_mqa", "mlp.experts.up_proj",
        "mlp.shared_experts.down_proj", "mlp.gate", "input_layernorm")}
    expect(list(found.values()) == [True] * 4 + [False] * 2, f"matrices of a layer: {found}")
    scales = [axes.get_xlim() for axes in figures["edr.png"].axes]
    most = max(max(run.probe["edr_harmonic"].values()) for run in study.runs)
    expect(len(set(scales)) == 1 and scales[0][0] == 0 and most < scales[0][1] <= 3,
           f"EDR on one scale from 0: {scales}, {most}")
    expect_words(words_in(figures["edr.png"]), "EDR, % of the ffn's width",
                 "harmonic mean,\ninput of down", "geometric mean,\noutput of up")
    expect_words(words_in(figures["groups.png"]), "q, k, v, step 1", "ffn out, step 100",
                 "attention out, step 200")
    many = made_up_study("inside, many", {"mode": [f"A_RATHER_LONG_PLACEMENT_{i}"
                                                   for i in range(8)], "seed": ["1"]}, steps=40)
    for run in many.runs[1:]:
        run.probe = made_up_probe(r, 6, dense=run is not many.runs[2])
    many.runs[3].log = []
    _, figures = draw_inside(many)
    expect("no probe" in words_in(figures["similarity.png"]) and "no diagnostics"
           in words_in(figures["gradients.png"]), "runs without are said to be")
    experts = made_up_study("inside, experts", {"mode": ["$PRE_<b>$"], "seed": ["1", "2"]},
                            steps=40)
    for run in experts.runs:
        run.probe = made_up_probe(r, 1, dense=False)
    _, figures = draw_inside(experts)
    expect(all("nothing here" in words_in(figures[name]) for name in ("ranks.png", "edr.png")),
           "experts have no ranks")
    empty = made_up_study("inside, empty", {"mode": ["PRE", "SPAN"], "seed": ["1", "2"]},
                          fate=lambda one: WAITING)
    expect(draw_inside(empty)[0] == [], "nothing to draw, no pictures")
    nulls = made_up_study("inside, nulls", {"mode": ["PRE"], "seed": ["1"]}, steps=40)
    for line in nulls.runs[0].log:
        if "grad_norms" in line:
            line["grad_norms"] = dict.fromkeys(line["grad_norms"])
    draw_inside(nulls)


def test_plot():
    """dev/plot.py's scale fits what follows the warmup, whatever spikes, blows up or is far
    below."""

    def write(name, change=lambda step, loss: loss, warmup=5, floor=0.24):
        folder = scratch / "plot" / name
        folder.mkdir(parents=True)
        log = made_up_log(random.Random(4), 0, 2, 4e-3, 200, floor)
        for line in log:
            if "loss" in line:
                line.update(loss=change(line["step"], line["loss"]),
                            lr=min(1, line["step"] / warmup))
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, log)))
        return folder, [(line["step"], line["loss"]) for line in log if "loss" in line]

    def limits(*runs):
        axes = plot.plt.figure().subplots()
        plot.draw_loss(axes, runs)
        return axes.get_ylim(), words_in(axes.figure), axes

    plain, losses = write("plain")
    (low, high), words, _ = limits(plain)
    tail = [loss for step, loss in losses if step >= 25]
    expect(max(tail) < high < losses[0][1] - 2, f"up to {high}, the tail up to {max(tail)}")
    expect(0.9 * min(tail) < low < min(tail), f"from {low}, the tail from {min(tail)}")
    expect("entropy of the corpus, 0.240, far below" in words, words)
    slow = limits(write("slow", warmup=60)[0])[0]
    expect(slow[1] < 3 < high, f"after a warmup of 60 steps: {slow}")
    spike = limits(write("spike", lambda step, loss: 500 if step == 100 else loss)[0])[0]
    expect(abs(spike[1] - high) < 0.3, f"a spike: {spike}, without {high}")
    wild = limits(plain, write("wild", lambda step, loss: 5000 if step > 120 else loss)[0])[0]
    expect(wild[1] < losses[0][1] + 1, f"beside a run that blew up: {wild}")
    (low, _), words, axes = limits(write("near", floor=1.5)[0])
    dotted = any(line.get_linestyle() == ":" for line in axes.lines)
    expect(low < 1.5 and dotted and "far below" not in words, "a floor that is near is a line")
    for name, words in (("loss", "plain, validation"), ("norms", "layer 1")):
        plot.plt.close("all")
        norms = ["--norms"] * (name == "norms")
        sys.argv = ["plot.py", str(plain), "-o", str(scratch / f"{name}.png"), *norms]
        plot.main()
        figure = plot.plt.gcf()
        legend = (figure.legends or [figure.axes[0].get_legend()])[0].get_window_extent()
        expect(words in words_in(figure), words_in(figure))
        expect(legend.y0 >= figure.axes[0].get_window_extent().y1 - 1, f"{name}: a legend above")
    plot.plt.close("all")


def test_hostile():
    """Names and outputs that are HTML, mathematics, quotes, control characters, and 200 characters
    long."""
    script, picture = ("<script>document.title='owned'</script>",
                       "\"><img src=http://evil.test/x onerror=\"document.title='owned'\">")
    long, odd = "x" * 200, "$\\frac{</style><b>&amp;\x1b[31m\x00\u202e'" + "$ é"
    study = made_up_study("hostile", {"mode": [script, picture, odd], "layers": ["2"],
                                      "a-flag": [long], "seed": ["1", "2"]}, steps=40,
                          fate=lambda one: FAILED if one["mode"] == picture and one["seed"] == "1"
                          else FINISHED)
    study.command, study.machine = f"python3 {script}", {picture: script}
    study.flags, study.notes = {"data": picture}, [odd]
    for run in study.runs:
        if run.status == FAILED:
            (run.folder / "output.txt").write_bytes(b"\xff\xfe</pre></details>" + script.encode()
                                                    + b"\x1b[0m\n" + b"y" * 3000)
    rows, drawn, _ = draw(study)
    outline = write_page(study, rows, drawn, [script])
    raw = (study.folder / "index.html").read_text()
    expect("<script" not in raw and "<b>" not in raw and "</style><b" not in raw
           and raw.count("<img") == len(drawn), "nothing raw")
    expect(outline.text.count(script) > 5 and outline.text.count(picture) > 5
           and long in outline.text and "&amp;" in outline.text, "all of it is there, as text")
    text = check_in_browser(study, drawn)
    expect(script in text and long in text, "and shown as text")


if __name__ == "__main__":
    browser = next((path for name in ("chromium", "chromium-browser", "google-chrome")
                    if (path := shutil.which(name))), None)
    if browser is None:
        sys.exit("error: expected Chromium or Chrome\n  -> apt-get install chromium")
    saved, save = [], pictures.save                        # the figures that were drawn
    pictures.save = inside.save = lambda figure, path: (saved.append(figure), save(figure, path))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, test in [(name, test) for name, test in list(globals().items())
                       if name.startswith("test_")]:
        if len(sys.argv) < 2 or any(word in name for word in sys.argv[1:]):
            begin = time.monotonic()
            try:
                test()
            except Exception as error:
                raise RuntimeError(f"{name} broke off") from error
            if os.environ.get("VERBOSE"):
                print(f"{name}: {time.monotonic() - begin:.1f} s")
    shutil.rmtree(scratch)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)
