/* The environment variables of sim.h. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

struct sim_config sim_config;

static bool read_number(const char *name, uint64_t fallback, uint64_t least, uint64_t most, uint64_t *value)
{
    const char *text = getenv(name);
    if (!text || !*text) {
        *value = fallback;
        return true;
    }
    char *end;
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    if (errno || *end || *text < '0' || *text > '9' || number < least || number > most) {
        fprintf(stderr, "simulated driver: %s=%s: expected a number from %llu to %llu\n", name, text,
                (unsigned long long)least, (unsigned long long)most);
        return false;
    }
    *value = number;
    return true;
}

/* As the real driver does: ordinals, up to the first that does not exist. */
static bool read_visible_devices(void)
{
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    sim_config.visible = 0;
    if (!text) {
        for (int i = 0; i < sim_config.devices; i++)
            sim_config.physical[i] = i;
        sim_config.visible = sim_config.devices;
        return true;
    }
    while (*text && sim_config.visible < SIM_MAX_DEVICES) {
        char *end;
        long physical = strtol(text, &end, 10);
        if (end == text || (*end && *end != ',')) {
            fprintf(stderr, "simulated driver: CUDA_VISIBLE_DEVICES: only a list of numbers is understood\n");
            return false;
        }
        if (physical < 0 || physical >= sim_config.devices)
            break;
        sim_config.physical[sim_config.visible++] = (int)physical;
        text = *end ? end + 1 : end;
    }
    return true;
}

/* Shared memory rather than a disk where there is a choice: the files are memory. */
static bool read_folder(void)
{
    const char *given = getenv("AMEM_SIM_DIR");
    if (given && *given) {
        if ((size_t)snprintf(sim_config.dir, sizeof sim_config.dir, "%s", given) >= sizeof sim_config.dir) {
            fprintf(stderr, "simulated driver: AMEM_SIM_DIR is too long\n");
            return false;
        }
    } else {
        const char *temporary = getenv("TMPDIR");
        if (access("/dev/shm", W_OK) == 0)
            temporary = "/dev/shm";
        else if (!temporary || !*temporary)
            temporary = "/tmp";
        snprintf(sim_config.dir, sizeof sim_config.dir, "%.3900s/amem-sim-%u", temporary, (unsigned)geteuid());
    }
    struct stat status;
    if ((mkdir(sim_config.dir, 0700) && errno != EEXIST) || stat(sim_config.dir, &status)
        || !S_ISDIR(status.st_mode)) {
        fprintf(stderr, "simulated driver: can't make the folder %s: %s\n", sim_config.dir, strerror(errno));
        return false;
    }
    if (status.st_uid != geteuid()) {
        fprintf(stderr, "simulated driver: the folder %s belongs to another user\n", sim_config.dir);
        return false;
    }
    return true;
}

bool sim_config_read(void)
{
    uint64_t devices, multicast, fabric, p2p;
    if (!read_number("AMEM_SIM_DEVICES", 8, 0, SIM_MAX_DEVICES, &devices)
        || !read_number("AMEM_SIM_MEMORY", UINT64_C(4) << 30, 1, UINT64_C(1) << 45, &sim_config.memory)
        || !read_number("AMEM_SIM_GRANULARITY", 2 << 20, 4096, 1 << 30, &sim_config.granularity)
        || !read_number("AMEM_SIM_MULTICAST", 1, 0, 1, &multicast)
        || !read_number("AMEM_SIM_FABRIC", 0, 0, 2, &fabric)
        || !read_number("AMEM_SIM_P2P", 1, 0, 1, &p2p))
        return false;
    if (sim_config.granularity & (sim_config.granularity - 1)
        || sim_config.granularity % (uint64_t)sysconf(_SC_PAGESIZE)) {
        fprintf(stderr, "simulated driver: AMEM_SIM_GRANULARITY=%llu: not a power of two of at least a page\n",
                (unsigned long long)sim_config.granularity);
        return false;
    }
    sim_config.devices = (int)devices;
    sim_config.multicast = multicast;
    sim_config.fabric = fabric == 1;
    sim_config.fabric_offered = fabric;
    sim_config.p2p = p2p;
    return read_folder() && read_visible_devices()
        && sim_calls_configure(getenv("AMEM_SIM_DELAYS"), getenv("AMEM_SIM_FAULTS"), getenv("AMEM_SIM_LOG"));
}

int sim_ordinal(int physical)
{
    for (int i = 0; i < sim_config.visible; i++)
        if (sim_config.physical[i] == physical)
            return i;
    return -1;
}
