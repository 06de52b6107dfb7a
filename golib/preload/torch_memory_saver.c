/*
 * torch_memory_saver_hook_mode_preload.abi3.so, for programs that look for a file
 * of this name and preload it into the processes that they start. All that it would
 * do is in libamem_hook.so, on which it depends; what it adds is that preloading it is
 * the wish to have amem in the place of torch_memory_saver in that process.
 */
#include <stdlib.h>

/*
 * Some programs read the file for this name, to learn whether there are backups on disk.
 * It is exported so that no linker takes it for unused.
 */
__attribute__((visibility("default"))) const char amem_preload_variables[] = "TMS_INIT_ENABLE_DISK_BACKUP";

__attribute__((constructor)) static void wish(void) { setenv("AMEM_COMPAT_TMS", "1", 0); }
