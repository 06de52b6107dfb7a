#define _GNU_SOURCE
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdint.h>
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

/* How the page at an address of the object is protected once it is relocated. */
static int protection(const struct object *object, size_t address) {
    const ElfW(Phdr) *phdr = object->phdr;
    int found = PROT_READ;
    for (int i = 0; i < object->phdr_count; i++) {
        size_t start = object->base + phdr[i].p_vaddr;
        if (address < start || address >= start + phdr[i].p_memsz) continue;
        if (phdr[i].p_type == PT_GNU_RELRO) return PROT_READ;
        if (phdr[i].p_type == PT_LOAD)
            found = (phdr[i].p_flags & PF_R ? PROT_READ : 0) | (phdr[i].p_flags & PF_W ? PROT_WRITE : 0) |
                    (phdr[i].p_flags & PF_X ? PROT_EXEC : 0);
    }
    return found;
}

/* Held while a page is writable that must not stay so: two threads may write to one page. */
static pthread_mutex_t writing = PTHREAD_MUTEX_INITIALIZER;

void elf_lock_writing(void) { pthread_mutex_lock(&writing); }
void elf_unlock_writing(void) { pthread_mutex_unlock(&writing); }

/* Stores a word in the object's memory, which other threads may be reading. */
static bool write_word_locked(const struct object *object, void *at, size_t word) {
    int before = protection(object, (size_t)at);
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *start = (void *)((size_t)at & ~(page - 1));
    bool writable = before & PROT_WRITE || !mprotect(start, page, before | PROT_WRITE);
    if (writable) __atomic_store_n((size_t *)at, word, __ATOMIC_RELEASE);
    if (writable && !(before & PROT_WRITE)) mprotect(start, page, before);
    return writable;
}

static bool write_word(const struct object *object, void *at, size_t word) {
    pthread_mutex_lock(&writing);
    bool written = write_word_locked(object, at, word);
    pthread_mutex_unlock(&writing);
    return written;
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

/* What the dynamic section says. */
struct dynamic {
    const ElfW(Sym) *symbols;
    const char *names;
    const ElfW(Half) *versions; /* NULL: symbols have no versions */
    const uint32_t *gnu_hash, *hash; /* a library has one of them, or both */
    struct {
        const ElfW(Rela) *list;
        size_t bytes;
    } relocations[2];
};

static bool read_dynamic(const struct object *object, struct dynamic *out) {
    const ElfW(Dyn) *dynamic = NULL;
    const ElfW(Phdr) *phdr = object->phdr;
    for (int i = 0; i < object->phdr_count; i++)
        if (phdr[i].p_type == PT_DYNAMIC) dynamic = (const void *)(object->base + phdr[i].p_vaddr);
    *out = (struct dynamic){0};
    for (; dynamic && dynamic->d_tag != DT_NULL; dynamic++) {
        size_t address = relocated(object, dynamic->d_un.d_ptr);
        switch (dynamic->d_tag) {
        case DT_SYMTAB: out->symbols = (const void *)address; break;
        case DT_STRTAB: out->names = (const void *)address; break;
        case DT_VERSYM: out->versions = (const void *)address; break;
        case DT_GNU_HASH: out->gnu_hash = (const void *)address; break;
        case DT_HASH: out->hash = (const void *)address; break;
        case DT_JMPREL: out->relocations[0].list = (const void *)address; break;
        case DT_PLTRELSZ: out->relocations[0].bytes = dynamic->d_un.d_val; break;
        case DT_RELA: out->relocations[1].list = (const void *)address; break;
        case DT_RELASZ: out->relocations[1].bytes = dynamic->d_un.d_val; break;
        }
    }
    return out->symbols && out->names;
}

int elf_replace_all(const struct object *object, const struct replacement *list, int n) {
    struct dynamic dynamic;
    if (!read_dynamic(object, &dynamic)) return 0;
    int replaced = 0;
    for (int t = 0; t < 2; t++) {
        const ElfW(Rela) *rela = dynamic.relocations[t].list;
        for (size_t i = 0; rela && i < dynamic.relocations[t].bytes / sizeof *rela; i++) {
            unsigned long type = ELF64_R_TYPE(rela[i].r_info);
            if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
            const ElfW(Sym) *symbol = &dynamic.symbols[ELF64_R_SYM(rela[i].r_info)];
            void *value = replacement(dynamic.names + symbol->st_name, list, n);
            if (!value) continue;
            void **slot = (void **)(object->base + rela[i].r_offset);
            if (*slot == value || write_word(object, slot, (size_t)value)) replaced++;
        }
    }
    return replaced;
}

struct rebind {
    size_t base; /* of the object whose slots stay */
    const struct rebinding *list;
    int n;
};

static int rebind_one(struct dl_phdr_info *info, size_t size, void *arg) {
    (void)size;
    const struct rebind *rebind = arg;
    struct object object = {.base = info->dlpi_addr, .phdr = info->dlpi_phdr, .phdr_count = info->dlpi_phnum};
    struct dynamic dynamic;
    if (object.base == rebind->base || !read_dynamic(&object, &dynamic)) return 0;
    for (int t = 0; t < 2; t++) {
        const ElfW(Rela) *rela = dynamic.relocations[t].list;
        for (size_t i = 0; rela && i < dynamic.relocations[t].bytes / sizeof *rela; i++) {
            unsigned long type = ELF64_R_TYPE(rela[i].r_info);
            if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT && type != R_X86_64_64) continue;
            void **slot = (void **)(object.base + rela[i].r_offset);
            for (int k = 0; k < rebind->n; k++)
                if (*slot == rebind->list[k].from) write_word_locked(&object, slot, (size_t)rebind->list[k].to);
        }
    }
    return 0;
}

void elf_rebind(const struct object *object, const struct rebinding *list, int n) {
    struct rebind rebind = {object->base, list, n};
    /*
     * Under the dynamic linker's lock of its list, since another thread may be unloading
     * any of these. Nothing here calls the dynamic linker, and fork() waits till it is over.
     */
    pthread_mutex_lock(&writing);
    dl_iterate_phdr(rebind_one, &rebind);
    pthread_mutex_unlock(&writing);
}

/* The end of the symbols that others can find, and the first of them. */
static uint32_t symbols_end(const struct dynamic *dynamic, uint32_t *first) {
    *first = 0;
    if (dynamic->hash) return dynamic->hash[1];
    if (!dynamic->gnu_hash) return 0;
    const uint32_t *hash = dynamic->gnu_hash;
    uint32_t buckets = hash[0], bloom = hash[2], last = 0;
    *first = hash[1];
    const uint32_t *bucket = hash + 4 + bloom * (sizeof(ElfW(Addr)) / sizeof *hash), *chain = bucket + buckets;
    for (uint32_t i = 0; i < buckets; i++)
        if (bucket[i] > last) last = bucket[i];
    if (last < *first) return 0;
    while (!(chain[last - *first] & 1)) last++; /* the chain that begins last ends last */
    return last + 1;
}

void *elf_find(const struct object *object, const char *symbol) {
    enum { HIDDEN = 0x8000 }; /* not the default version */
    struct dynamic dynamic;
    if (!read_dynamic(object, &dynamic)) return NULL;
    uint32_t first, end = symbols_end(&dynamic, &first);
    for (uint32_t i = first; i < end; i++) {
        const ElfW(Sym) *found = &dynamic.symbols[i];
        if (found->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(found->st_info) != STT_FUNC) continue;
        if (dynamic.versions && dynamic.versions[i] & HIDDEN) continue;
        if (!strcmp(dynamic.names + found->st_name, symbol)) return (void *)(object->base + found->st_value);
    }
    return NULL;
}

bool elf_divert(const struct object *object, void *from, void *to) {
    struct dynamic dynamic;
    if (!read_dynamic(object, &dynamic)) return false;
    bool written = true;
    uint32_t first, end = symbols_end(&dynamic, &first);
    for (uint32_t i = first; i < end; i++) {
        const ElfW(Sym) *found = &dynamic.symbols[i];
        if (found->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(found->st_info) != STT_FUNC) continue;
        if (object->base + found->st_value != (size_t)from) continue;
        /* The dynamic linker adds the load address to it, in whole words. */
        if (!write_word(object, (void *)&found->st_value, (size_t)to - object->base)) written = false;
    }
    return written;
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
