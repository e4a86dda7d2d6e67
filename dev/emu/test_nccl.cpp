// test_nccl.cpp: what emulated NCCL (nccl.cpp) gives, refuses and reports, between processes that
// are forked here.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <cuda_runtime.h>

struct Id { char path[128]; };
extern "C" {
int ncclGetUniqueId(Id *id);
int ncclCommInitRank(void **world, int size, Id id, int rank);
int ncclCommDestroy(void *world);
int ncclCommGetAsyncError(void *world, int *error);
int ncclCommAbort(void *world);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root,
               void *world, cudaStream_t stream);
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, void *world,
                  cudaStream_t stream);
}

enum { FLOAT = 7, DOUBLE = 8, BFLOAT16 = 9, COUNT = 100003 };  // more than a piece of the board
struct Rank { void *world; int rank, size; cudaStream_t stream, other; float *x; double *y; };

static int passed, failed;
static void expect(bool ok, const std::string &what) {
    if (ok) passed++;
    else failed++, printf("FAILED %s\n", what.c_str());
}
#define NEED(condition)                                                    \
    do {                                                                   \
        if (!(condition)) {                                                \
            fprintf(stderr, "rank %d: expected %s\n", r.rank, #condition); \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

// Runs body in `size` processes and compares their statuses, 128 + n for signal n, that of the last
// may be another; they must say `words`. body destroys or aborts the communicator if `ends` is set.
static void run(const char *what, int size, int status, const char *words,
                const std::function<void(Rank &)> &body, int last = -1, bool ends = false) {
    Id id;
    FILE *said = tmpfile();
    std::vector<pid_t> children;
    expect(ncclGetUniqueId(&id) == 0, "an id");
    for (int rank = 0; rank < size; rank++) {
        pid_t child = fork();
        if (!child) {
            dup2(fileno(said), STDERR_FILENO);
            Rank r = {nullptr, rank, size, nullptr, nullptr, nullptr, nullptr};
            NEED(ncclCommInitRank(&r.world, size, id, rank) == 0);
            NEED(cudaStreamCreateWithFlags(&r.stream, cudaStreamNonBlocking) == 0);
            NEED(cudaStreamCreateWithFlags(&r.other, cudaStreamNonBlocking) == 0);
            NEED(cudaMalloc((void **)&r.x, 2 * COUNT * sizeof(float)) == 0 &&
                 cudaMalloc((void **)&r.y, COUNT * sizeof(double)) == 0);
            for (int i = 0; i < COUNT; i++)
                r.x[i] = (float)(i + rank), r.x[COUNT + i] = -1, r.y[i] = i * 0.5 + rank;
            body(r);
            NEED(ends || ncclCommDestroy(r.world) == 0);
            exit(0);
        }
        children.push_back(child);
    }
    for (pid_t child : children) {
        int got, expected = child == children.back() && last >= 0 ? last : status;
        waitpid(child, &got, 0);
        got = WIFSIGNALED(got) ? 128 + WTERMSIG(got) : WEXITSTATUS(got);
        expect(got == expected, std::string(what) + ": status " + std::to_string(got));
    }
    std::string text;
    char line[512];
    rewind(said);
    while (fgets(line, sizeof line, said)) text += line;
    fclose(said);
    if (status == 1) fputs(text.c_str(), stdout);
    expect(text.find(words) != std::string::npos,
           std::string(what) + ": expected '" + words + "', found: " + text);
}

// Sums and copies, in place and not, in one group; every rank is a root once.
static void right(Rank &r) {
    NEED(ncclGroupStart() == 0);
    for (int root = 0; root < r.size; root++) {
        NEED(ncclReduce(r.y + root, r.y + root, 1, DOUBLE, 0, root, r.world, r.stream) == 0);
        NEED(ncclReduce(r.x, r.rank == root ? r.x + COUNT : nullptr, COUNT, FLOAT, 0, root, r.world,
                        r.stream) == 0);
    }
    NEED(ncclBroadcast(r.x, r.x, COUNT, FLOAT, r.size - 1, r.world, r.stream) == 0);
    NEED(r.x[COUNT] == -1);  // nothing has run: the stream is asked at its end
    NEED(ncclGroupEnd() == 0);
    NEED(cudaStreamSynchronize(r.stream) == 0);
    int all = r.size * (r.size - 1) / 2;
    for (int i = 0; i < COUNT; i++) {
        NEED(r.x[COUNT + i] == (float)(r.size * i + all));
        NEED(r.x[i] == (float)(i + r.size - 1));
    }
    for (int i = 0; i < r.size; i++)
        NEED(r.y[i] == (i == r.rank ? r.size * i * 0.5 + all : i * 0.5 + r.rank));
}

static void arguments(Rank &r) {
    float host[4];
    NEED(ncclReduce(r.x, r.x, 4, 42, 0, 0, r.world, r.stream) == 4);
    NEED(ncclReduce(r.x, r.x, 4, BFLOAT16, 0, 0, r.world, r.stream) == 4);
    NEED(ncclReduce(r.x, r.x, 4, FLOAT, 3, 0, r.world, r.stream) == 4);
    NEED(ncclReduce(r.x, r.x, 4, FLOAT, 0, r.size, r.world, r.stream) == 4);
    NEED(ncclBroadcast(r.x, r.x, 4, FLOAT, -1, r.world, r.stream) == 4);
    NEED(ncclBroadcast(host, r.x, 4, FLOAT, r.rank, r.world, r.stream) == 4);
    NEED(ncclBroadcast(r.x, host, 4, FLOAT, 0, r.world, r.stream) == 4);
    NEED(ncclBroadcast(r.x, r.x, 2 * COUNT + 1, FLOAT, 0, r.world, r.stream) == 4);
    NEED(ncclReduce(r.x, r.x + 1, 4, FLOAT, 0, r.rank, r.world, r.stream) == 4);
    NEED(ncclReduce(r.x, r.x, 4, FLOAT, 0, 0, &r, r.stream) == 4);
    NEED(ncclGroupEnd() == 5);
    NEED(ncclGroupStart() == 0);
    for (int i = 0; i < 2048; i++)
        NEED(ncclBroadcast(r.x, r.x, 1, FLOAT, 0, r.world, r.stream) == 0);
    NEED(ncclBroadcast(r.x, r.x, 1, FLOAT, 0, r.world, r.stream) == 4);
    NEED(ncclGroupEnd() == 0);
    NEED(cudaStreamSynchronize(r.stream) == 0);
}

// Two groups, of which EMU_NCCL_FAULT names one. Waits for half a second, then returns what
// ncclCommGetAsyncError says, plus 100 if both are done.
static int two_groups(Rank &r) {
    int error = -1;
    cudaError_t done = cudaErrorNotReady;
    NEED(ncclReduce(r.x, r.x, COUNT, FLOAT, 0, 0, r.world, r.stream) == 0);
    NEED(ncclBroadcast(r.x, r.x, COUNT, FLOAT, 0, r.world, r.stream) == 0);
    for (int i = 0; i < 100 && (done = cudaStreamQuery(r.stream)) == cudaErrorNotReady; i++) {
        NEED(cudaGetLastError() == cudaErrorNotReady);
        usleep(5000);
    }
    NEED(ncclCommGetAsyncError(r.world, &error) == 0);
    return done == cudaSuccess ? 100 + error : error;
}

// A group that waits keeps no other stream, nor a query; aborted, it is done.
static void abort_waiting(Rank &r) {
    NEED(two_groups(r) == 0);
    NEED(cudaMemsetAsync(r.y, 0, sizeof *r.y, r.other) == 0);
    NEED(cudaStreamSynchronize(r.other) == 0 && r.y[0] == 0);
    NEED(cudaStreamQuery(r.stream) == cudaErrorNotReady);
    NEED(ncclCommAbort(r.world) == 0);
    NEED(cudaStreamSynchronize(r.stream) == 0);
    NEED(ncclCommAbort(r.world) == 4 && ncclCommDestroy(r.world) == 4);
}

static void fault(const char *text) { setenv("EMU_NCCL_FAULT", text, 1); }

static void faults(void) {
    setenv("EMU_NCCL_SECONDS", "0", 1);
    setenv("NCCL_DEBUG", "INFO", 1);
    fault("dies 2 ncclReduce 1");
    run("dies", 3, 0, "rank 1 aborts 2 groups", abort_waiting, 128 + SIGKILL, true);
    fault("dies 1 ncclBroadcast 1");
    run("dies later", 2, 0, "rank 0 aborts 1 groups", abort_waiting, 128 + SIGKILL, true);
    fault("leaves 1 ncclBroadcast 1");
    run("leaves", 2, 0, "", [](Rank &r) { NEED(two_groups(r) == 100); }, 128 + SIGKILL);
    fault("hangs 1 ncclReduce 1");
    run("hangs", 2, 0, "rank 1 aborts 2 groups", abort_waiting, 0, true);
    fault("fails 1 ncclReduce 1");
    run("fails", 2, 0, "aborts", [](Rank &r) {
        NEED(two_groups(r) == (r.rank ? 6 : 0));
        NEED(ncclCommAbort(r.world) == 0);
    }, 0, true);
    run("fails, not aborted", 2, 9, "rank 1 exits, and 2 groups wait", [](Rank &r) {
        two_groups(r);
        exit(9);
    });
    fault("stuck 1 ncclReduce 1");
    run("stuck", 2, 128 + SIGALRM, "rank 1 aborts 2 groups", [](Rank &r) {
        alarm(2);
        two_groups(r);
        if (r.rank) ncclCommAbort(r.world);
        cudaStreamSynchronize(r.stream);
    });
    unsetenv("EMU_NCCL_FAULT");
    unsetenv("NCCL_DEBUG");
}

int main(void) {
    for (int size = 1; size <= 3; size++) run("sums and copies", size, 0, "", right);
    run("arguments", 2, 0, "", arguments);
    run("another call", 2, 3, "processes stand in different calls", [](Rank &r) {
        if (r.rank) ncclReduce(r.x, r.x, 4, FLOAT, 0, 0, r.world, r.stream);
        else ncclBroadcast(r.x, r.x, 4, FLOAT, 0, r.world, r.stream);
        cudaStreamSynchronize(r.stream);
    });
    run("another count", 2, 3,
        "rank 1: ncclReduce of 5 elements of type 7, root 0, call 1 of 1 in group 0", [](Rank &r) {
            ncclReduce(r.x, r.x, 4 + r.rank, FLOAT, 0, 0, r.world, r.stream);
            cudaStreamSynchronize(r.stream);
        });
    run("another root", 2, 3, "processes stand in different calls", [](Rank &r) {
        ncclReduce(r.x, r.x, 4, FLOAT, 0, r.rank, r.world, r.stream);
        cudaStreamSynchronize(r.stream);
    });
    run("another group", 2, 3, "call 1 of 2 in group 0", [](Rank &r) {
        if (r.rank) ncclGroupStart();
        for (int i = 0; i < 2; i++) ncclReduce(r.x, r.x, 4, FLOAT, 0, 0, r.world, r.stream);
        if (r.rank) ncclGroupEnd();
        cudaStreamSynchronize(r.stream);
    });
    setenv("EMU_NCCL_SECONDS", "0.5", 1);
    run("one that does not come", 2, 3, "a process did not come", [](Rank &r) {
        if (!r.rank) ncclReduce(r.x, r.x, 4, FLOAT, 0, 0, r.world, r.stream);
        if (r.rank) sleep(1), _exit(3);
        cudaStreamSynchronize(r.stream);
    });
    faults();
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0;
}
