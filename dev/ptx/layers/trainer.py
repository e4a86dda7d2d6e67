"""The trainer itself, with all its launches in order: no kernel may read what nobody has written.
The numbers of whole models are compared by suite.py."""
import ctypes
import os
import shutil
import sys
import tempfile

import build

SMALL = ("--layers 2 --width 64 --heads 2 --ffn 96 --seq 32 --batch 2 --warmup 0 --sample 0 "
         "--val-tokens 64 --tune off").split()
EXPERTS = ("--experts 8 --experts-per-token 3 --shared-experts 1 --dense-layers 1 "
           "--router sigmoid --balance-rate 0.01 --sequence-loss 0.01").split()


def trainer(t, what, *flags):
    """Runs it in a process of its own, which ends with a message where a launch fails."""
    print(f"  trainer: {what}" if t.show else "", end="\n" if t.show else "", flush=True)
    child = os.fork()
    if not child:
        if not t.show:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        t.gpu.vm.runtime_exit(1)
        words = [b"train_gpt", *(f.encode() for f in flags)]
        argv = (ctypes.c_char_p * (len(words) + 1))(*words, None)
        os._exit(t.gpu.lib.run_trainer(ctypes.c_int64(len(words)), argv))
    t.same(what, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)


def check_trainer(t):
    """A step with statistics, an evaluation, and a sample."""
    t.case("trainer")
    folder = tempfile.mkdtemp(dir=os.path.join(build.ROOT, build.OUT))
    run = folder + "/run"
    sys.stdout.flush()
    trainer(t, "a step", *SMALL, *EXPERTS, "--steps", "1", "--norms-every", "1", "--out", run)
    trainer(t, "an evaluation", "--from", run, "--eval")
    trainer(t, "a sample", "--from", run, "--sample", "4", "--prompt", "The ")
    shutil.rmtree(folder)
