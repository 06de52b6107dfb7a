#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "hook.h"

static int first_adds(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    *(unsigned long long *)arg = info->dlpi_adds;
    return 1;
}

unsigned long long elf_loads(void) {
    unsigned long long adds = 0;
    dl_iterate_phdr(first_adds, &adds);
    return adds;
}

struct objects {
    struct object *list;
    int count, capacity;
};

static int collect(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    struct objects *objects = arg;
    if (objects->count == objects->capacity) {
        int capacity = objects->capacity ? 2 * objects->capacity : 64;
        struct object *list = realloc(objects->list, (size_t)capacity * sizeof *list);
        if (!list) return 1;
        objects->list = list;
        objects->capacity = capacity;
    }
    struct object *object = &objects->list[objects->count++];
    *object = (struct object){.base = info->dlpi_addr, .phdr = info->dlpi_phdr, .phdr_count = info->dlpi_phnum};
    if (info->dlpi_name) strncpy(object->path, info->dlpi_name, sizeof object->path - 1);
    return 0;
}

void elf_each(void (*visit)(const struct object *object, void *arg), void *arg) {
    /* dl_iterate_phdr holds the dynamic linker's lock, so collect first: visit may call dlopen. */
    struct objects objects = {0};
    dl_iterate_phdr(collect, &objects);
    for (int i = 0; i < objects.count; i++) visit(&objects.list[i], arg);
    free(objects.list);
}

static bool protected_after_relocation(const struct object *object, size_t address) {
    const ElfW(Phdr) *phdr = object->phdr;
    for (int i = 0; i < object->phdr_count; i++) {
        if (phdr[i].p_type != PT_GNU_RELRO) continue;
        size_t start = object->base + phdr[i].p_vaddr;
        if (address >= start && address < start + phdr[i].p_memsz) return true;
    }
    return false;
}

static bool write_slot(const struct object *object, void **slot, void *value) {
    bool relro = protected_after_relocation(object, (size_t)slot);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)((size_t)slot & ~(page - 1));
    if (relro && mprotect(start, page, PROT_READ | PROT_WRITE)) return false;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    if (relro) mprotect(start, page, PROT_READ);
    return true;
}

/* The dynamic section's addresses are relocated in place by glibc, but for the vdso. */
static size_t relocated(const struct object *object, size_t address) {
    return address < object->base ? address + object->base : address;
}

int elf_replace(const struct object *object, const char *symbol, void *value) {
    return elf_replace_all(object, &(struct replacement){symbol, value}, 1);
}

/* The value for a symbol, or NULL. */
static void *replacement(const char *symbol, const struct replacement *list, int n) {
    for (int i = 0; i < n; i++)
        if (!strcmp(symbol, list[i].symbol)) return list[i].value;
    return NULL;
}

int elf_replace_all(const struct object *object, const struct replacement *list, int n) {
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Phdr) *phdr = object->phdr;
    for (int i = 0; i < object->phdr_count; i++)
        if (phdr[i].p_type == PT_DYNAMIC) dynamic = (const void *)(object->base + phdr[i].p_vaddr);
    if (!dynamic) return 0;

    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    struct {
        const ElfW(Rela) *list;
        size_t bytes;
    } tables[2] = {{NULL, 0}, {NULL, 0}};
    for (; dynamic->d_tag != DT_NULL; dynamic++) {
        size_t address = relocated(object, dynamic->d_un.d_ptr);
        switch (dynamic->d_tag) {
        case DT_SYMTAB: symbols = (const void *)address; break;
        case DT_STRTAB: names = (const void *)address; break;
        case DT_JMPREL: tables[0].list = (const void *)address; break;
        case DT_PLTRELSZ: tables[0].bytes = dynamic->d_un.d_val; break;
        case DT_RELA: tables[1].list = (const void *)address; break;
        case DT_RELASZ: tables[1].bytes = dynamic->d_un.d_val; break;
        }
    }
    if (!symbols || !names) return 0;

    int replaced = 0;
    for (int t = 0; t < 2; t++) {
        const ElfW(Rela) *rela = tables[t].list;
        for (size_t i = 0; rela && i < tables[t].bytes / sizeof *rela; i++) {
            unsigned long type = ELF64_R_TYPE(rela[i].r_info);
            if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
            void *value = replacement(names + symbols[ELF64_R_SYM(rela[i].r_info)].st_name, list, n);
            if (!value) continue;
            void **slot = (void **)(object->base + rela[i].r_offset);
            if (*slot == value || write_slot(object, slot, value)) replaced++;
        }
    }
    return replaced;
}

bool elf_holds(const struct object *object, void *const *values, int n) {
    const ElfW(Phdr) *phdr = object->phdr;
    for (int i = 0; i < object->phdr_count; i++) {
        if (phdr[i].p_type != PT_LOAD || !(phdr[i].p_flags & PF_W)) continue;
        size_t start = (object->base + phdr[i].p_vaddr + sizeof(void *) - 1) & ~(sizeof(void *) - 1);
        size_t end = object->base + phdr[i].p_vaddr + phdr[i].p_memsz;
        for (void *const *word = (void *const *)start; (size_t)(word + 1) <= end; word++)
            for (int k = 0; k < n; k++)
                if (values[k] && *word == values[k]) return true;
    }
    return false;
}
