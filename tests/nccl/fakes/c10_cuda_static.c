/* A stand-in for a libc10_cuda.so with the CUDA runtime inside: it has no slots. */
int c10_version(void);
int c10_version(void) { return 0; }
