// mpi.h: the functions of Open MPI that comm.c calls, loaded when mpirun has started this process.
// Handles are pointers and constants as in Open MPI's mpi.h.
#pragma once

#define MPI_TABLE(CALL) \
CALL(Init_thread, int *argc, char ***argv, int level, int *provided) \
CALL(Finalize,    void) \
CALL(Comm_rank,   void *world, int *rank) \
CALL(Comm_size,   void *world, int *size) \
CALL(Send,        const void *data, int count, void *type, int to, int tag, void *world) \
CALL(Recv,        void *data, int count, void *type, int from, int tag, void *world, void *status) \
CALL(Ireduce,     const void *from, void *to, int count, void *type, void *sum, int root, \
                  void *world, void **request) \
CALL(Ibcast,      void *data, int count, void *type, int root, void *world, void **request) \
CALL(Testall,     int count, void **requests, int *done, void *statuses) \
CALL(Waitall,     int count, void **requests, void *statuses)

// A field, and the name in the library after "ompi_mpi_".
#define MPI_CONSTANTS(CONSTANT) \
CONSTANT(world, comm_world) \
CONSTANT(byte, byte) \
CONSTANT(float_type, float) \
CONSTANT(double_type, double) \
CONSTANT(sum, op_sum)

typedef struct Mpi {
#define MPI_FIELD(name, ...) int (*name)(__VA_ARGS__);
    MPI_TABLE(MPI_FIELD)
    void *world, *byte, *float_type, *double_type, *sum;
} Mpi;

#define MPI_IN_PLACE ((void *)1)
enum { MPI_THREAD_FUNNELED = 1 };
enum { MPI_PIECE = 1 << 24 };                 // elements, or bytes, of one transfer
