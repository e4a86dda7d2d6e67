# The programs of the tests that need no GPU and no emulator; dev/test/README.md says what each
# proves. Included by the Makefile. All link build/services.a: the services and the corpus.

# GPU_TESTS: the layers whose tests a program of CUDA tests holds (dev/nvcc.mk, emu.mk); by
# default all, and the tests of whole models (test_gpt.cu) with them.
GPU_TESTS ?= $(patsubst dev/test/test_%.cu,%,$(wildcard dev/test/test_*.cu))

# The judge in every precision, with its main out of the way.
build/judge_%.o: train_gpt.c build/flags
	$(CC) $(FLAGS) $(CPU_$*) -Dmain=main_$* -c $< -o $@
JUDGES := build/judge_fp32.o build/judge_bf16.o build/judge_fp64.o

build/test_%.o: dev/test/test_%.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
build/test_gpt.o: test_gpt.c build/flags
	$(CC) $(FLAGS) -c $< -o $@
TESTS := build/test_gpt.o $(patsubst dev/test/%.c,build/%.o,$(wildcard dev/test/test_*.c))
build/test_gpt: $(TESTS) $(JUDGES) build/services.a
	$(CC) $(FLAGS) $(INPUTS) -o $@ -lm

# The trainer with faults on purpose (processes.sh), and a disk that fails (faults.sh).
build/faulty: dev/test/faulty.c build/judge_fp32.o build/services.a
	$(CC) $(FLAGS) $(CPU_fp32) $(INPUTS) -o $@ -lm
build/shim.so: dev/test/shim.c build/flags
	$(CC) $(FLAGS) -shared -fPIC $< -o $@

# What other programs compute is compared with these: the scores of tasks (test_lm_eval.py), logits
# (test_hf.py), tokens (test_tokenizer.py); words of the corpus in a sample (cli.sh).
build/cpu-%/scores: dev/test/scores.c build/judge_fp32.o build/services.a
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(CPU_fp32) $(call mode_of,$*) $(INPUTS) -o $@ -lm
build/logits: dev/test/logits.c build/judge_fp32.o build/services.a
	$(CC) $(FLAGS) $(INPUTS) -o $@ -lm
build/tokenize: dev/test/tokenize.c build/services.a
	$(CC) $(FLAGS) $(INPUTS) -o $@ -lm
build/words: dev/test/words.c build/services.a
	$(CC) $(FLAGS) $(INPUTS) -o $@ -lm

# Sizes of models, for the table of dev/SCALE.md (dev/scale.py).
build/scale: dev/scale.c build/services.a
	$(CC) $(FLAGS) -I. $(INPUTS) -o $@ -lm
