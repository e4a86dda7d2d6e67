#!/usr/bin/env python3
"""test_lm_eval.py: --eval gives lm-evaluation-harness's numbers, example for example, offline.

    python3 dev/test/test_lm_eval.py [--mode SPAN --export 'COMMAND {run} {folder}']

The tasks are lm-evaluation-harness's own definitions of hellaswag, piqa, arc, winogrande, sciq,
lambada_openai and wikitext, over the made-up rows of dev/test/tasks.jsonl in the place of the
datasets; data/get.py makes our files of the same rows. The model is trained here for a moment; it
is given to the harness as a folder that transformers loads: what --export makes of a run, its
tokenizer too, or, without it, a stock LlamaForCausalLM with the weights of a PRE run. No separator
is before a context. Compared are log-likelihoods to 1e-4, whether they are greedy, the choices and
every metric, at two lengths of sequences, one of which cuts contexts and makes several windows of a
text. Needs lm_eval, torch, transformers, accelerate and tiktoken.
"""
import argparse
import json
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile

scratch = pathlib.Path(tempfile.mkdtemp(prefix="test_lm_eval_"))
os.environ.update(HF_HOME=str(scratch / "cache"), TQDM_DISABLE="1",
                  HF_DATASETS_DISABLE_PROGRESS_BARS="1", HF_DATASETS_OFFLINE="1",
                  HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false",
                  OMP_WAIT_POLICY="passive")
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "data"))
import get                                                 # needs tiktoken and numpy
import lm_eval
import lm_eval.tasks
import safetensors.torch
import tokenizers
import torch
import transformers
from lm_eval.models.huggingface import HFLM

LAYERS, WIDTH, HEADS, KV_HEADS, FFN, SEQ = 3, 64, 4, 2, 160, 256
CUT = 80                                                   # a shorter --seq
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
    rows = {name: [] for name in get.TASKS}
    for line in (ROOT / "dev/test/tasks.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows[row.pop("task")].append(row)
    return rows


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
    return get.Tokenizer(str(folder)), transformers.PreTrainedTokenizerFast(
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

def harness(rows, folder, seq):
    """lm-evaluation-harness on its own tasks with our rows: its results, and of every example the
    log-likelihoods of its completions."""
    manager, tasks = lm_eval.tasks.TaskManager(), []
    for name, task in rows.items():
        path = folder.parent / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in task))
        (definition,) = (p for p in pathlib.Path(lm_eval.tasks.__file__).parent.glob("*/*.yaml")
                         if f"\ntask: {name}\n" in "\n" + p.read_text())
        yaml = folder.parent / f"local_{name}.yaml"
        yaml.write_text(f"include: {definition}\ntask: local_{name}\ntag: null\ndataset_path: "
                        "json\ndataset_name: null\ntraining_split: null\ndataset_kwargs:\n"
                        f"  data_files:\n    validation: {path}\n    test: {path}\n")
        tasks.append(str(yaml))
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=4,
                 max_length=seq, trust_remote_code=True, add_bos_token=False)
    results = lm_eval.simple_evaluate(model=model, tasks=tasks, task_manager=manager,
                                      log_samples=True, bootstrap_iters=0, verbosity="ERROR")
    samples = {}
    for name in rows:
        ordered = sorted(results["samples"][f"local_{name}"], key=lambda sample: sample["doc_id"])
        samples[name] = [sample["filtered_resps"] for sample in ordered]
    return {name: results["results"][f"local_{name}"] for name in rows}, samples


def ours(program, run, tasks, seq):
    """The scores of each sequence of every example: log p, greedy, and the choices."""
    found = {}
    for line in call(program.parent / "scores", "--from", run, "--eval", "--tasks", tasks, "--seq",
                     seq).splitlines():
        words = line.split()
        if words[0] in get.TASKS and len(words) == 6:
            found.setdefault(words[0], {}).setdefault(int(words[1]), []).append(
                (float(words[2]), int(words[3]), int(words[4]), int(words[5])))
    return {name: [examples[i] for i in range(len(examples))] for name, examples in found.items()}


def compare(rows, theirs, mine, seq):
    worst, count = 0.0, 0
    for name, task in rows.items():
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
                lengths = list(map(len, get.task_example(name, task[i])[2]))
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


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default="PRE")
    parser.add_argument("--export", help="a command that makes a folder for transformers of a run: "
                                         "{run}, {folder}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows()
    tokenizer, same = make_tokenizer(rows, scratch / "vocab")
    (scratch / "tasks").mkdir()
    tokenizer.write(str(scratch / "tasks/tokenizer.bin"))
    for name, task in rows.items():
        data = (get.text_file(task, tokenizer) if name == "wikitext"
                else get.eval_file(name, task, tokenizer))
        (scratch / "tasks" / f"{name}.bin").write_bytes(data)
    program, run = make_run(args.mode, rows)
    folder = scratch / "hf"
    if args.export:
        call(*shlex.split(args.export.format(run=run, folder=folder)))
    else:
        make_llama(run, folder)
        same.save_pretrained(folder)
    results, theirs = harness(rows, folder, SEQ)
    compare(rows, theirs, ours(program, run, scratch / "tasks", SEQ), SEQ)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines = [line for line in log if "task_results" in line]
    expect([line["step"] for line in lines] == [30, 60]
           and all(line["task_results"].keys() == rows.keys() for line in lines),
           f"tasks at every validation: {lines}")
    compare_metrics(results, lines[-1]["task_results"], rows)
    table = call(program, "--from", run, "--eval", "--tasks", scratch / "tasks", "--sample", 0)
    expect(all(f"{name} " in table for name in rows)
           and f"{lines[-1]['task_results']['wikitext']['word_perplexity']:.4f}" in table,
           f"--eval prints them: {table}")
    results, theirs = harness(rows, folder, CUT)
    compare(rows, theirs, ours(program, run, scratch / "tasks", CUT), CUT)
    shutil.rmtree(scratch)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
