"""One rank of a scenario with torch memory in regions: `torch_ranks.py SCENARIO [JSON parameters]`.

Started by run.py, as ranks.py is. Contents are bytes that can be made again
from a seed, compared whole on the device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ranks
from ranks import GIVEN_BACK, MEMORY_SLACK, Group, Rank, check

MB = 1 << 20
# What a first pause's host memory takes on the device, for its page tables.
PAGE_TABLES = 8 * MB
# Of a tag: some share a block of the caching allocator, some have several to themselves.
SIZES = (100, 3000, MB + 12, 20 * MB, 20 * MB, 64 * MB, 130 * MB)
KINDS: dict[str, Any] = {"weights": "cpu", "kv": "none", "logs": "disk"}


def fill(tensor: torch.Tensor, seed: int) -> None:
    generator = torch.Generator(tensor.device)
    generator.manual_seed(seed)
    tensor.random_(generator=generator)


def same(tensor: torch.Tensor, seed: int) -> bool:
    """Whether a tensor has the contents that fill() gives it."""
    wanted = torch.empty_like(tensor)
    fill(wanted, seed)
    return torch.equal(tensor, wanted)


class Block:
    """A tensor of bytes in the region in which it is made, or none, and what must be in it."""

    def __init__(self, r: Rank, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device=r.device)
        self.address = self.tensor.data_ptr()
        self.fill()

    def fill(self, seed: int | None = None) -> None:
        self.seed = random.getrandbits(62) if seed is None else seed
        fill(self.tensor, self.seed)

    def verify(self, what: str) -> None:
        check(self.tensor.data_ptr() == self.address, f"{what}: the address has changed")
        check(same(self.tensor, self.seed), f"{what}: contents of {self.tensor.numel()} bytes have changed")


Blocks = list[Block]


def make(r: Rank, tag: str, backup: Any, sizes: tuple[int, ...] = SIZES) -> Blocks:
    import amem

    with amem.region(tag, backup=backup):
        return [Block(r, size) for size in sizes]


def size_of(*lists: Blocks) -> int:
    return sum(b.tensor.numel() for blocks in lists for b in blocks)


def verify(what: str, *lists: Blocks) -> None:
    for blocks in lists:
        for block in blocks:
            block.verify(what)


def give_back(r: Rank, least: int, *tags: str) -> int:
    """Pauses tags and checks that the device has their memory. Answers what will be in use after their resume.

    Every process of the step must call it, or none of the others may
    allocate meanwhile.
    """
    import amem

    torch.cuda.synchronize()
    r.peers.barrier()
    before = r.used()
    r.peers.barrier()
    started = time.perf_counter()
    transition = amem.pause(*tags)
    r.pauses.append(time.perf_counter() - started)
    check(transition.changed and transition.bytes >= least, f"pause of {tags}: {transition}, of {least} bytes at least")
    r.peers.barrier()
    enough = GIVEN_BACK * transition.bytes - PAGE_TABLES
    given = before - r.used()
    limit = time.monotonic() + 1.0
    # The driver may still be freeing what another process released last.
    while given < enough and time.monotonic() < limit:
        time.sleep(0.02)
        given = before - r.used()
    r.given.append(given / transition.bytes)
    r.nccl_bytes = max(r.nccl_bytes, transition.bytes)
    check(
        given >= enough,
        f"pause of {tags}: the device got {given} bytes back, {transition.bytes} were released",
    )
    check(not amem.pause(*tags).changed, "a second pause claims to have done something")
    r.peers.barrier()
    # Less than before where torch had unused memory, which a pause gives back for good.
    return before - given + transition.bytes


def bring_back(r: Rank, expected: int | None, *tags: str) -> None:
    """Resumes tags; with what give_back() answered, checks that as much is in use."""
    import amem

    r.peers.barrier()
    started = time.perf_counter()
    transition = amem.resume(*tags)
    r.resumes.append(time.perf_counter() - started)
    check(transition.changed, f"resume of {tags} changed nothing")
    check(not amem.resume(*tags).changed, "a second resume claims to have done something")
    r.cycles += 1
    r.peers.barrier()
    after = r.used()
    check(
        expected is None or abs(after - expected) <= MEMORY_SLACK,
        f"device memory in use is {after} after the resume of {tags}, {expected} was expected",
    )
    r.peers.barrier()


def cublas_workspace(r: Rank) -> None:
    """torch allocates it at a stream's first product, which must not be in a region that is paused later."""
    ones = torch.ones(64, 64, device=r.device)
    (ones @ ones).sum().item()


# Scenarios on one GPU


def regions(r: Rank) -> dict[str, Any]:
    """Three tags with a backup each, paused one by one in changing orders, and all at once."""
    import amem

    plain = [Block(r, size) for size in SIZES]
    made = {tag: make(r, tag, backup) for tag, backup in KINDS.items()}
    for number in range(int(r.params["cycles"])):
        order = list(KINDS)[number % 3 :] + list(KINDS)[: number % 3]
        expected = {}
        for place, tag in enumerate(order):
            r.stage(f"cycle {number}: pause {tag}")
            expected[tag] = give_back(r, size_of(made[tag]), tag)
            verify(f"while {order[: place + 1]} are paused", plain, *(made[t] for t in order[place + 1 :]))
            if KINDS[tag] != "none":
                for block in made[tag]:
                    kept = amem.cpu_backup(block.tensor)
                    check(kept.device.type == "cpu" and kept.shape == block.tensor.shape, f"backup is {kept.shape}")
                    check(same(kept.to(r.device), block.seed), f"the backup of {tag} differs from its contents")
            else:
                refused(lambda: amem.cpu_backup(made["kv"][0].tensor), "the backup of memory without one")
        r.scribble()
        if number % 2:  # the last that was paused is the first back
            for tag in reversed(order):
                r.stage(f"cycle {number}: resume {tag}")
                bring_back(r, expected[tag], tag)
                back(tag, made[tag])
        else:
            for tag in order:
                r.stage(f"cycle {number}: resume {tag}")
                bring_back(r, expected[order[0]] if tag == order[-1] else None, tag)
                back(tag, made[tag])
        verify(f"cycle {number}", plain, *made.values())
    r.stage("all at once")
    total = give_back(r, size_of(*made.values()))
    check(amem.state() is amem.State.PAUSED, "not paused after a pause of all tags")
    r.scribble()
    bring_back(r, total)
    for tag, blocks in made.items():
        back(tag, blocks)
    verify("all at once", plain, *made.values())
    r.stage("a tag that does not exist")
    refused(lambda: amem.pause("no-such-tag"), "pausing a tag that does not exist")
    refused(lambda: amem.cpu_backup(plain[0].tensor), "the backup of memory that is no region's")
    return {}


def refused(action: Callable[[], Any], what: str) -> None:
    import amem

    try:
        action()
    except amem.AmemError:
        return
    raise ranks.CheckFailed(f"{what} raised nothing")


def back(tag: str, blocks: Blocks) -> None:
    """Checks what a resume must have kept; what it need not keep is written anew, each block with its own."""
    if KINDS[tag] != "none":
        verify(f"{tag} after the resume", blocks)
        return
    for block in blocks:
        check(block.tensor.data_ptr() == block.address, f"{tag}: the address has changed")
        block.fill()
    verify(f"{tag}, written after the resume", blocks)


def region_rules(r: Rank) -> dict[str, Any]:
    """Which tag memory belongs to: nested, without, in other threads, in backward, and after it was freed."""
    cublas_workspace(r)
    for number in range(int(r.params["cycles"])):
        for part in (products, nested, without, threads, freed, backward):
            r.stage(f"cycle {number}: {part.__name__}")
            part(r)
            gc.collect()
            torch.cuda.empty_cache()
    others = [d for d in range(torch.cuda.device_count()) if d != r.device.index]
    started = [d for d in others if torch._C._cuda_hasPrimaryContext(d)]
    check(not started, f"a region has started CUDA on GPU {started}, which nobody uses")
    return {}


def products(r: Rank) -> None:
    """What cuBLASLt, which a product with a bias goes through, keeps from its first use in a region on."""
    import amem

    def product(data: torch.Tensor) -> torch.Tensor:
        return torch.addmm(data[0], data, data)

    def make_data() -> torch.Tensor:
        return torch.randn(512, 512, generator=r.generator, device=r.device).bfloat16()

    with amem.region("products", backup="cpu"):
        data = make_data()
        result = product(data)
    wanted, plain = result.cpu(), make_data()
    expected = give_back(r, 2 * 2 * 512 * 512, "products")
    product(plain)
    torch.cuda.synchronize()  # an illegal address, if it used the region's memory
    bring_back(r, expected, "products")
    check(torch.equal(result.cpu(), wanted), "a product has changed")
    check(torch.equal(product(data).cpu(), wanted), "the same product gives another result")


def nested(r: Rank) -> None:
    import amem

    with amem.region("outer", backup="cpu"):
        outer = [Block(r, 20 * MB)]
        with amem.region("inner", backup="none"):
            inner = [Block(r, 30 * MB), Block(r, 500)]
        outer += [Block(r, 20 * MB), Block(r, 500)]
    plain = [Block(r, 20 * MB), Block(r, 500)]
    give_back(r, size_of(inner), "inner")
    verify("while the inner region is paused", outer, plain)
    bring_back(r, None, "inner")
    for block in inner:
        block.fill()
    give_back(r, size_of(outer), "outer")
    verify("while the outer region is paused", inner, plain)
    bring_back(r, None, "outer")
    verify("after both", outer, inner, plain)


def without(r: Rank) -> None:
    import amem

    with amem.region("outer", backup="cpu"):
        inside = [Block(r, 20 * MB), Block(r, 500)]
        with amem.disable():
            plain = [Block(r, 20 * MB), Block(r, 500)]
        inside += [Block(r, 20 * MB), Block(r, 500)]
    expected = give_back(r, size_of(inside))
    verify("while all is paused", plain)
    bring_back(r, expected)
    verify("after all was paused", inside, plain)


def threads(r: Rank) -> None:
    """Threads with a region each at the same time."""
    import amem

    made: dict[str, Blocks] = {}
    failures: list[BaseException] = []
    together = threading.Barrier(4)

    def work(tag: str) -> None:
        try:
            torch.cuda.set_device(r.device)
            blocks = []
            for size in (500, 3 * MB, 25 * MB):
                together.wait(20)
                with amem.region(tag, backup="cpu"):
                    together.wait(20)
                    blocks.append(Block(r, size))
            torch.cuda.current_stream().synchronize()
            made[tag] = blocks
        except BaseException as error:
            failures.append(error)
            together.abort()

    workers = [threading.Thread(target=work, args=(f"thread{i}",)) for i in range(together.parties)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    for tag, blocks in made.items():
        give_back(r, size_of(blocks), tag)
        verify(f"while {tag} is paused", *(others for name, others in made.items() if name != tag))
        bring_back(r, None, tag)
    verify("after each thread's was paused", *made.values())


def freed(r: Rank) -> None:
    """Memory that one tag has freed is no other's, nor ordinary memory, as long as it pauses with its tag."""
    import amem

    for tag, backup in (("first", "cpu"), ("second", "none"), ("first", "none"), ("second", "cpu")):
        used = make(r, tag, backup, (40 * MB, 40 * MB, 500))
        del used
        gc.collect()
        torch.cuda.empty_cache()
        other = {"first": "second", "second": "first"}[tag]
        made = make(r, other, "cpu", (40 * MB, 40 * MB, 500))
        plain = [Block(r, 40 * MB), Block(r, 500)]
        amem.pause(tag)
        verify(f"while only {tag} is paused, of which nothing is in use", made, plain)
        give_back(r, size_of(made), other)
        verify("while both tags are paused", plain)
        del made[0]  # freed while paused
        r.scribble()
        amem.resume()
        verify(f"after {tag} and {other} were paused", made, plain)
        del made, plain


def backward(r: Rank) -> None:
    """Gradients of a backward in a region, which torch makes on another thread by itself."""
    import amem

    with amem.region("train", backup="cpu"):
        layer = torch.nn.Linear(1024, 1024, device=r.device)
        data = torch.randn(64, 1024, device=r.device)
        layer(data).square().mean().backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    check(len(grads) == 2, f"{len(grads)} gradients")
    wanted = [t.detach().clone() for t in (*layer.parameters(), *grads)]
    expected = give_back(r, 2 * 4 * 1024 * 1024, "train")
    for got, right in zip(grads, wanted[2:]):
        check(torch.equal(amem.cpu_backup(got).to(r.device), right), "a gradient's backup differs from it")
    r.scribble()
    bring_back(r, expected, "train")
    for got, right in zip((*layer.parameters(), *grads), wanted):
        check(torch.equal(got, right), "parameters or gradients have changed")
    layer.zero_grad()
    layer(data).square().mean().backward()
    for parameter, right in zip(layer.parameters(), wanted[2:]):
        grad = parameter.grad
        check(grad is not None and torch.allclose(grad, right), "the same backward gives other gradients")


def region_graph(r: Rank) -> dict[str, Any]:
    """CUDA graphs on tensors of regions, with memory of a tag and with ordinary memory, replayed after each resume."""
    import amem

    n = 2048

    def small(*shape: int) -> torch.Tensor:
        # Whole numbers whose products and sums float32 holds exactly, in whichever order.
        return torch.randint(-1, 2, shape, generator=r.generator, device=r.device).float()

    with amem.region("weights", backup="cpu"):
        weights = small(n, n)
    with amem.region("kv", backup="none"):
        source, result = torch.zeros(n, n, device=r.device), torch.zeros(n, n, device=r.device)

    def step() -> None:
        result.copy_((source @ weights).relu() @ weights)

    cuda: Any = torch.cuda  # torch's type hints leave this constructor out
    side = cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    tagged: Any = torch.cuda.CUDAGraph()
    with amem.cuda_graph(tagged, "graph", "none", stream=side):
        step()
    plain: Any = torch.cuda.CUDAGraph()
    with amem.region("weights", backup="cpu"), torch.cuda.graph(plain, stream=side):
        step()
    torch.cuda.synchronize()
    copy = weights.clone()

    def replay(what: str) -> None:
        check(torch.equal(weights, copy), f"the weights have changed {what}")
        for graph in (tagged, plain):
            source.copy_(small(n, n))
            result.fill_(ranks.POISON)
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            check(torch.equal(result, (source @ copy).relu() @ copy), f"a graph's result is wrong {what}")

    replay("before the first pause")
    one = 4 * n * n
    for number in range(int(r.params["cycles"])):
        for tags, least in (((), 4 * one), (("weights",), one), (("graph",), one), (("kv",), 2 * one)):
            r.stage(f"cycle {number}: {tags or 'all'}")
            expected = give_back(r, least, *tags)
            r.scribble()
            bring_back(r, expected, *tags)
            replay(f"after {tags or 'all'} was paused")
    return {}


LEFT: list[Any] = []


def default_region(r: Rank) -> dict[str, Any]:
    """All of a program's memory, of all threads and of a graph; torch's own cache in use, and evicted."""
    import amem

    torch.cuda.empty_cache()
    amem.default_region("trainer")
    blocks = [Block(r, size) for size in SIZES]
    with amem.region("kv", backup="none"):
        other = Block(r, 20 * MB)

    def elsewhere() -> None:
        torch.cuda.set_device(r.device)
        blocks.append(Block(r, 20 * MB))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    layer = torch.nn.Linear(1024, 1024, device=r.device)
    layer(torch.randn(64, 1024, device=r.device)).square().mean().backward()
    grads = [p.grad for p in layer.parameters() if p.grad is not None]
    wanted = [grad.cpu() for grad in grads]
    cuda: Any = torch.cuda  # torch's type hints leave this constructor out
    result = torch.zeros(MB, device=r.device)
    captured: Any = cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result.copy_((torch.ones(50 * MB, device=r.device) * 3)[-MB:])
    captured.replay()
    check(float(result.sum()) == 3 * MB, "the graph's result is wrong")
    for number in range(int(r.params["cycles"])):
        r.stage(f"cycle {number}: pause")
        expected = give_back(r, size_of(blocks) + 2 * 4 * 1024 * 1024 + 200 * MB, "trainer")
        with amem.disable():
            other.verify("a region beside the default one")
            small = torch.ones(64, 64, device=r.device).bfloat16()
            check(float(torch.addmm(small[0], small, small)[0, 0]) == 65, "a product while paused is wrong")
            outside = Block(r, 64 * MB)
            r.scribble()
            outside.verify("ordinary memory made while paused")
        del small, outside
        bring_back(r, None, "trainer")
        check(abs(r.used() - expected) <= 200 * MB, f"in use are {r.used()} bytes, about {expected} were expected")
        verify(f"cycle {number}", blocks, [other])
        check(all(torch.equal(grad.cpu(), right) for grad, right in zip(grads, wanted)), "gradients have changed")
        result.zero_()
        captured.replay()
        check(float(result.sum()) == 3 * MB, "the graph's result is wrong after a resume")
        r.stage(f"cycle {number}: cache")
        free, _ = torch.cuda.mem_get_info()
        cached = torch.empty(free * 6 // 10, dtype=torch.uint8, device=r.device)
        del cached
        larger = torch.empty(free * 8 // 10, dtype=torch.uint8, device=r.device)  # needs the cached memory
        larger[-1] = 5
        check(int(larger[-1]) == 5, "memory in the place of what was cached")
        del larger
        try:
            torch.empty(free * 2, dtype=torch.uint8, device=r.device)
            raise ranks.CheckFailed("memory was allocated that the device does not have")
        except torch.cuda.OutOfMemoryError:
            pass
        torch.cuda.empty_cache()
        verify(f"cycle {number}: cache", blocks)
    r.stage("none")
    amem.default_region(None)
    torch.cuda.empty_cache()
    plain = Block(r, 256 * MB)
    give_back(r, size_of(blocks), "trainer")
    with amem.region("kv", backup="none"):  # torch's cache has parts of segments that are paused
        plain.verify("made after the default region's end")
    bring_back(r, None, "trainer")
    verify("the end", blocks)
    del blocks[:]
    torch.cuda.empty_cache()
    return {}


def returned(r: Rank) -> dict[str, Any]:
    """What the program frees after a resume goes back to the device, and not in units of all that was there."""
    import amem

    size, count = 32 * MB, 48
    torch.cuda.empty_cache()
    amem.default_region("trainer")
    blocks = [Block(r, size) for _ in range(count)]
    worst = 0
    for number in range(int(r.params["cycles"])):
        r.stage(f"cycle {number}")
        expected = give_back(r, size_of(blocks), "trainer")
        bring_back(r, expected, "trainer")
        verify(f"cycle {number}", blocks)
        full = r.used()
        kept = [block for i, block in enumerate(blocks) if i % 8 == number % 8]  # the rest has holes of 7
        freed = size_of(blocks) - size_of(kept)
        blocks = kept
        gone = full - r.used()
        worst = max(worst, freed - gone)
        # The driver's memory is shared by chunks of a slab of 160 MB at most, cut to 64 MB when it comes back.
        check(gone >= freed // 2, f"{freed} bytes were freed, and the device got {gone} of them")
        verify(f"cycle {number}, freed", blocks)
        blocks += [Block(r, size) for _ in range(count - len(blocks))]
        verify(f"cycle {number}, made again", blocks)
    amem.default_region(None)
    return {"note": f"{worst / MB:.0f} MB stayed at most of {7 * count // 8 * size / MB:.0f} MB freed"}


def host_memory(r: Rank) -> dict[str, Any]:
    """Host memory is given back, and a region ends, while a kernel runs: the program launches on meanwhile."""
    import amem

    cuda: Any = torch.cuda
    blocks = make(r, "weights", "cpu", (512 * MB, 512 * MB))
    other = make(r, "logits", "cpu", (256 * MB,))
    work = torch.zeros(1024, device=r.device).add_(1)  # its kernel is loaded, which may wait for those that run
    side = cuda.Stream()
    longest = 0.0
    for number in range(int(r.params["cycles"])):
        r.stage(f"cycle {number}")
        give_back(r, size_of(blocks, other))
        bring_back(r, None)
        verify(f"cycle {number}", blocks, other)
        for action in (lambda: amem.free_host_memory(), lambda: amem.free_host_memory("weights")):
            torch.cuda.synchronize()
            ended = cuda.Event()
            with torch.cuda.stream(side):
                torch.cuda._sleep(int(4e9))  # some two seconds
                ended.record()
            thread = threading.Thread(target=action)
            thread.start()
            launched = 0
            while not ended.query():
                started = time.perf_counter()
                work.add_(1)
                longest = max(longest, time.perf_counter() - started)
                launched += 1
                time.sleep(0.001)
            thread.join()
            torch.cuda.synchronize()
            check(launched > 100, f"{launched} launches in the time of a kernel: host memory stopped the program")
        verify(f"cycle {number}, host memory given back", blocks, other)
    return {"note": f"a launch took {1e3 * longest:.1f} ms at most while host memory was given back"}


READS = r"""
extern "C" __global__ void total(const int *from, unsigned long long count, unsigned long long *to) {
    unsigned long long sum = 0;
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x)
        sum += (unsigned int)from[i];
    atomicAdd(to, sum);
}
"""


def other_gpus(r: Rank) -> dict[str, Any]:
    """A kernel of one GPU reads a region's memory on another, as it may read cudaMalloc's, and NCCL of one process."""
    import amem

    if torch.cuda.device_count() < 2:
        raise ranks.NotPossible("two GPUs are needed")
    try:
        cupy: Any = importlib.import_module("cupy")
    except ImportError as error:
        raise ranks.NotPossible("cupy is needed, to launch a kernel of our own") from error
    other = torch.device("cuda", 1 - int(r.device.index))
    count = 16 * MB
    torch.zeros(1, device=other).copy_(torch.zeros(1, device=r.device))  # torch enables peer access, both ways
    torch.zeros(1, device=r.device).copy_(torch.zeros(1, device=other))
    kernel = cupy.RawKernel(READS, "total")
    tensors = []
    with amem.region("weights", backup="cpu"):
        for device in (r.device, other):
            tensors.append(torch.randint(0, 1 << 20, (count,), dtype=torch.int32, device=device))
    inputs = [torch.ones(MB, device=device) for device in (r.device, other)]
    with amem.region("weights", backup="cpu"):
        summed = [torch.zeros(MB, device=device) for device in (r.device, other)]
    wanted = [int(t.sum(dtype=torch.int64)) for t in tensors]

    def read(what: str) -> None:
        for device, tensor, right in zip((other, r.device), tensors, wanted):
            with torch.cuda.device(device):
                result = torch.zeros(1, dtype=torch.int64, device=device)
                torch.cuda.synchronize()
                with cupy.cuda.Device(device.index):
                    kernel((64,), (256,), (tensor.data_ptr(), cupy.uint64(count), result.data_ptr()))
                torch.cuda.synchronize()
                check(int(result) == right, f"a kernel of {device} read {int(result)} and not {right} {what}")
        for tensor in summed:
            tensor.zero_()
        torch.cuda.nccl.all_reduce(inputs, summed)
        for tensor in summed:
            check(bool((tensor == 2).all()), f"an all-reduce of one process is wrong {what}")

    read("at first")
    for number in range(int(r.params["cycles"])):
        r.stage(f"cycle {number}")
        for tags in (("weights",), ()):
            torch.cuda.synchronize(other)
            check(amem.pause(*tags).bytes >= 2 * 4 * count, "too little was given back")
            amem.resume(*tags)
            read(f"after {tags or 'all'} was paused")
        r.cycles += 1
    return {}


def left_paused(r: Rank) -> dict[str, Any]:
    """The process ends while its memory is paused, with tensors and a graph that live until Python's end."""
    import amem

    blocks = [block for tag, backup in KINDS.items() for block in make(r, tag, backup)]
    graph: Any = torch.cuda.CUDAGraph()
    with amem.cuda_graph(graph, "graph", "none"):
        result = blocks[0].tensor + 1
    graph.replay()
    give_back(r, size_of(blocks))
    LEFT.extend((blocks, graph, result))
    return {}


def shared(r: Rank) -> dict[str, Any]:
    """Weights in a region that another process has opened by torch.multiprocessing."""
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=borrow, args=(theirs,), daemon=True)
    child.start()

    def ask(verb: str, *arguments: Any) -> Any:
        ours.send((verb, *arguments))
        check(ours.poll(40), f"the other process does not answer to {verb}")
        good, answer = ours.recv()
        check(good, f"{verb} in the other process: {answer}")
        return answer

    def both(what: str) -> None:
        verify(f"{what}, in the owner", weights)
        check(ask("verify", [b.seed for b in weights]) == [], f"{what}: contents differ in the other process")

    weights = make(r, "weights", "cpu")
    r.stage("share")
    ask("open", [b.tensor for b in weights])
    both("at first")
    for number in range(int(r.params["cycles"])):
        for block in weights[:: 1 + number % 2]:
            block.seed = random.getrandbits(62)
            ask("fill", weights.index(block), block.seed)
        both(f"cycle {number}, written by the other process")
        r.stage(f"cycle {number}: the owner pauses")
        expected = give_back(r, size_of(weights), "weights")
        r.scribble()
        bring_back(r, expected, "weights")
        both(f"cycle {number}, after the owner's resume")
        r.stage(f"cycle {number}: both pause")
        free = torch.cuda.mem_get_info()[0]
        ask("pause", "weights")
        check(torch.cuda.mem_get_info()[0] - free < MEMORY_SLACK, "memory came back though its owner uses it")
        verify("while the other process is paused", weights)
        expected = give_back(r, size_of(weights), "weights")
        r.scribble()
        bring_back(r, expected, "weights")
        ask("resume", "weights")
        both(f"cycle {number}, after both")
        for block in weights:
            block.fill()
        torch.cuda.synchronize()
        both(f"cycle {number}, written by the owner")
    r.stage("the other process closes")
    ask("close")
    child.join(20)
    check(child.exitcode == 0, f"the other process ended with {child.exitcode}")
    expected = give_back(r, size_of(weights), "weights")
    bring_back(r, expected, "weights")
    verify("after the other process has ended", weights)
    return {}


def borrow(pipe: Any) -> None:
    """The other process of shared(): does what it is asked for until it is asked to close."""
    import amem

    tensors: list[torch.Tensor] = []
    verb = ""
    while verb != "close":
        verb, *arguments = pipe.recv()
        answer: Any = None
        try:
            if verb == "open":
                tensors = arguments[0]
            elif verb == "verify":
                answer = [i for i, (t, seed) in enumerate(zip(tensors, arguments[0])) if not same(t, seed)]
            elif verb == "fill":
                fill(tensors[arguments[0]], arguments[1])
                torch.cuda.synchronize()
            elif verb == "close":
                tensors.clear()
                gc.collect()
            else:
                getattr(amem, verb)(*arguments)
            del arguments
            # Its scratch memory must not blur what a pause gives back.
            torch.cuda.empty_cache()
            pipe.send((True, answer))
        except Exception as error:
            pipe.send((False, f"{type(error).__name__}: {error}"))


def region_memory(r: Rank) -> dict[str, Any]:
    """The owner finds no memory to resume; another process on the GPU holds it, and lets go of it."""
    import amem

    owner = r.job == 0
    size = 2 << 30
    blocks = make(r, "weights", "cpu", (size // 2, size // 4)) if owner else []
    others = make(r, "kv", "none", (size // 4,)) if owner else []
    for attempt in range(int(r.params["cycles"])):
        r.stage(f"attempt {attempt}")
        r.peers.barrier()
        if owner:
            check(amem.pause().changed, "pause changed nothing")
        r.peers.barrier()
        hog = None
        if not owner:
            free, _ = torch.cuda.mem_get_info()
            hog = torch.empty(free - size // 2, dtype=torch.uint8, device=r.device)
        r.peers.barrier()
        if owner:
            for tags in ([], ["weights"]):
                no_room(*tags)
                check(amem.state() is amem.State.PAUSED, "not paused after the error")
            try:
                with amem.region("weights", backup="cpu"):
                    torch.empty(size, dtype=torch.uint8, device=r.device)
                raise ranks.CheckFailed("memory was allocated that the device does not have")
            except torch.cuda.OutOfMemoryError:
                pass
        r.peers.barrier()
        del hog
        torch.cuda.empty_cache()
        r.peers.barrier()
        if owner:
            check(amem.resume().changed, "resume changed nothing")
            check(amem.state() is amem.State.ACTIVE, "not active after the second attempt")
            verify("after the second attempt", blocks)
            back("kv", others)
        r.cycles += 1
        r.peers.barrier()
    return {}


def no_room(*tags: str) -> None:
    import amem

    try:
        amem.resume(*tags)
    except amem.OutOfMemoryError as error:
        check(isinstance(error, torch.cuda.OutOfMemoryError), "the error is not torch.cuda.OutOfMemoryError too")
        return
    raise ranks.CheckFailed("resume without enough memory raised nothing")


def saver(r: Rank) -> dict[str, Any]:
    """What programs do with torch_memory_saver, on amem under its name."""
    import amem.compat

    amem.compat.install()
    package: Any = importlib.import_module("torch_memory_saver")
    torch_memory_saver = package.torch_memory_saver
    with package.configure_subprocess():
        pass
    torch_memory_saver.hook_mode = "torch"
    check(torch_memory_saver.enabled, "not enabled")
    plain = Block(r, MB)
    size = 1_000_000_000

    def used_change(action: Callable[[], Any]) -> int:
        before = r.used()
        action()
        return r.used() - before

    r.stage("one region")
    with torch_memory_saver.region():
        tensor = torch.full((size,), 100, dtype=torch.uint8, device=r.device)
    address = tensor.data_ptr()
    for _ in range(int(r.params["cycles"])):
        check(used_change(torch_memory_saver.pause) < -0.9 * size, "a pause gave no memory back")
        torch_memory_saver.pause()  # paused already
        check(used_change(torch_memory_saver.resume) > 0.9 * size, "a resume took no memory")
        torch_memory_saver.resume()
        check(tensor.data_ptr() == address, "the address has changed")
        tensor.fill_(7)
        check(bool((tensor == 7).all()), "the memory does not hold data after a resume")
        r.cycles += 1
    plain.verify("beside a region")
    del tensor

    r.stage("backup")
    with torch_memory_saver.region(tag="kept", enable_cpu_backup=True):
        kept = [Block(r, 20 * MB), Block(r, 3000)]
    with torch_memory_saver.region(tag="lost", enable_cpu_backup=False):
        lost = [Block(r, 20 * MB)]
    for _ in range(int(r.params["cycles"])):
        torch_memory_saver.pause("kept")
        verify("while the other tag is paused", lost)
        for block in kept:
            copy = torch_memory_saver.get_cpu_backup(block.tensor)
            check(same(copy.to(r.device), block.seed), "get_cpu_backup() gives other contents")
        torch_memory_saver.pause("lost")
        r.scribble()
        torch_memory_saver.resume("lost")
        torch_memory_saver.resume("kept")
        verify("with a backup", kept)
        for block in lost:
            block.fill()

    r.stage("disable")
    with torch_memory_saver.region(tag="kept", enable_cpu_backup=True):
        with torch_memory_saver.disable():
            outside = Block(r, 20 * MB)
        inside = Block(r, 20 * MB)
    torch_memory_saver.pause()
    outside.verify("made while disabled, all is paused")
    torch_memory_saver.resume()
    verify("after all was paused", kept, [inside, outside, plain])
    check(torch_memory_saver.get_cpu_backup(inside.tensor) is None, "a backup of what is not paused")
    torch_memory_saver.pause("no-such-tag")  # does nothing there
    torch_memory_saver.resume("no-such-tag")

    r.stage("graph")
    result = torch.zeros(MB, device=r.device)
    captured: Any = torch.cuda.CUDAGraph()
    with torch_memory_saver.cuda_graph(captured, tag="graph"):
        result.copy_((torch.ones(50 * MB, device=r.device) * 3)[-MB:])
    captured.replay()
    wanted = result.clone()
    for _ in range(int(r.params["cycles"])):
        given = -used_change(functools.partial(torch_memory_saver.pause, "graph"))
        check(given > 200 * MB, f"the graph's memory is 400 MB, and {given} bytes came back")
        torch_memory_saver.resume("graph")
        result.zero_()
        captured.replay()
        check(torch.equal(result, wanted), "the graph's result is wrong after a resume")
    return {}


# Scenarios on several GPUs


def tags_and_nccl(r: Rank) -> dict[str, Any]:
    """All is paused; weights and NCCL come back and are synchronised over it; then the rest comes back."""
    import amem

    world = r.start()
    made = {"weights": make(r, "weights", "cpu"), "kv": make(r, "kv", "none", (300 * MB, 40 * MB))}
    # What NCCL connects later would look like memory lost in a cycle.
    for size in r.sizes:
        r.verify(world, size)
    synchronise(r, world, made["weights"], 0)
    for number in range(int(r.params["cycles"])):
        r.stage(f"cycle {number}: pause")
        expected = give_back(r, size_of(*made.values()))
        r.scribble()
        r.stage(f"cycle {number}: resume the weights")
        bring_back(r, None, "weights", "nccl")
        verify("after the resume", made["weights"])
        synchronise(r, world, made["weights"], number)
        r.verify(world, r.sizes[number % len(r.sizes)])
        r.stage(f"cycle {number}: resume the rest")
        bring_back(r, expected)
        back("kv", made["kv"])
        verify("after all is back", made["weights"])
        synchronise(r, world, made["kv"], number)
        r.verify(world, r.sizes[(number + 2) % len(r.sizes)])
        # NCCL alone, and all but NCCL.
        expected = give_back(r, 1, "nccl")
        verify("while only NCCL is paused", *made.values())
        bring_back(r, expected, "nccl")
        expected = give_back(r, size_of(*made.values()), "weights", "kv")
        r.verify(world, 1 << 20)
        bring_back(r, expected, "kv", "weights")
        back("kv", made["kv"])
        verify("after all but NCCL was paused", made["weights"])
    check(amem.state() is amem.State.ACTIVE, "not active at the end")
    r.finish([world])
    return {}


def synchronise(r: Rank, world: Group, blocks: Blocks, number: int) -> None:
    """New contents by a broadcast from one rank, then by a sum of all ranks', in the region's own memory."""
    root = number % r.world
    seeds = [(r.seed + 1000 * number + i) & (2**62 - 1) for i in range(len(blocks))]
    for block, seed in zip(blocks, seeds):
        if r.rank == root:
            block.fill(seed)
        else:
            block.fill()
            block.seed = seed
        dist.broadcast(block.tensor, src=root, group=world.handle)
    verify("after a broadcast", blocks)
    for block, seed in zip(blocks, seeds):
        block.fill(seed + 17 * (1 + r.rank))
        wanted = torch.zeros_like(block.tensor)
        part = torch.empty_like(block.tensor)
        for rank in range(r.world):
            fill(part, seed + 17 * (1 + rank))
            wanted += part  # wraps, as NCCL's sums do
        dist.all_reduce(block.tensor, group=world.handle)
        check(torch.equal(block.tensor, wanted), f"the sum of {block.tensor.numel()} bytes is wrong")
    for block in blocks:
        block.fill()


def nccl_graph(r: Rank) -> dict[str, Any]:
    """Collectives in a CUDA graph on memory of a region, which NCCL may register with its peers."""
    import amem

    world = r.start()
    r.verify(world, 1 << 24)
    elements = 1 << 22
    holes = bool(r.params.get("holes"))
    region: Any = amem.region("weights", backup="cpu")
    if holes:  # the memory that is freed below goes back, to the beginning of a slab
        torch.cuda.empty_cache()
        amem.default_region("weights")
        region = contextlib.nullcontext()
    with region:
        first = torch.zeros(elements, dtype=torch.float32, device=r.device)
        source = torch.zeros(elements, dtype=torch.float32, device=r.device)
        total = torch.zeros_like(source)
        parts = torch.zeros(elements * r.world, dtype=torch.float32, device=r.device)
    del first
    if holes:
        torch.cuda.empty_cache()
        amem.default_region(None)
    torch.cuda.synchronize()
    r.peers.barrier()
    captured: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        total.copy_(source)
        dist.all_reduce(total, group=world.handle)
        dist.all_gather_into_tensor(parts, source, group=world.handle)
    torch.cuda.synchronize()

    def replay(what: str) -> None:
        world.rounds += 1
        r.data(source, world, "all_reduce", r.rank)
        total.fill_(ranks.POISON)
        parts.fill_(ranks.POISON)
        torch.cuda.synchronize()
        r.peers.barrier()
        captured.replay()
        wanted = torch.zeros_like(total)
        for rank in range(r.world):
            piece = r.data(torch.empty_like(total), world, "all_reduce", rank)
            wanted += piece
            check(torch.equal(parts[rank * elements : (rank + 1) * elements], piece), f"all-gather is wrong {what}")
        check(torch.equal(total, wanted), f"all-reduce is wrong {what}")

    replay("before the first pause")
    least = 4 * elements * (2 + r.world)
    for number in range(int(r.params["cycles"])):
        for tags in (("weights",), ("nccl",), ()):
            r.stage(f"cycle {number}: pause {tags or 'all'}")
            expected = give_back(r, 1 if tags == ("nccl",) else least, *tags)
            r.scribble()
            bring_back(r, expected, *tags)
            r.stage(f"cycle {number}: replay after {tags or 'all'}")
            replay(f"after {tags or 'all'} was paused")
    r.stage("destroy")
    captured.reset()
    r.finish([world])
    return {}


class Attention(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(width) for _ in range(2)])
        self.mixed = torch.nn.Linear(width, 3 * width)
        self.wide = torch.nn.Linear(width, 4 * width)
        self.narrow = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mixed(self.norms[0](x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        x = x + scores.softmax(-1) @ v
        wide: torch.Tensor = self.wide(self.norms[1](x))
        return x + self.narrow(torch.nn.functional.gelu(wide))  # type: ignore[no-any-return,unused-ignore]


def training(r: Rank) -> dict[str, Any]:
    """A small transformer under DDP, all paused between steps. run.py compares it with a run without amem."""
    stock = bool(r.params.get("stock"))
    whole = bool(r.params.get("whole")) and not stock
    torch.use_deterministic_algorithms(True, warn_only=True)
    cublas_workspace(r)
    world = r.start()
    r.verify(world, 1 << 20)
    words, width, length = 8192, 512, 128

    def region() -> Any:
        if stock or whole:
            return contextlib.nullcontext()
        import amem

        return amem.region("model", backup="cpu")

    disabled: Any = contextlib.nullcontext
    if whole:
        import amem

        disabled = amem.disable
        torch.cuda.empty_cache()
        amem.default_region("model")

    torch.manual_seed(1)
    with region():
        model = torch.nn.Sequential(
            torch.nn.Embedding(words, width), *(Attention(width) for _ in range(4)), torch.nn.Linear(width, words)
        ).to(r.device)
        parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[r.device.index])
        optimiser = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    least = sum(4 * p.numel() for p in model.parameters())
    data = torch.Generator().manual_seed(100 + r.rank)
    losses = []
    for number in range(int(r.params["steps"])):
        r.stage(f"step {number}")
        tokens = torch.randint(0, words, (8, length + 1), generator=data).to(r.device)
        logits = parallel(tokens[:, :-1])
        loss: Any = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        with region():  # the first one makes its state
            optimiser.step()
        optimiser.zero_grad()
        losses.append(float(loss).hex())
        del tokens, logits, loss
        if not stock:
            r.stage(f"step {number}: pause")
            # From the second step on the optimiser's state, twice the weights, is there too.
            expected = give_back(r, least)
            with disabled():
                r.scribble()
            bring_back(r, expected)
    weights = [int(p.detach().view(torch.int32).sum(dtype=torch.int64)) for p in model.parameters()]
    check(losses[0] != losses[-1], "the losses do not change")
    r.finish([world])
    return {"losses": losses, "weights": weights}


SCENARIOS: dict[str, Callable[[Rank], dict[str, Any]]] = {
    f.__name__: f
    for f in (
        regions,
        region_rules,
        region_graph,
        default_region,
        returned,
        host_memory,
        other_gpus,
        left_paused,
        shared,
        region_memory,
        saver,
        tags_and_nccl,
        nccl_graph,
        training,
    )
}


if __name__ == "__main__":
    sys.exit(ranks.main(sys.argv, SCENARIOS))
