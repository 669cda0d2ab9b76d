/* The machine of cuda_emu.h: fibers, blocks, barriers, shared memory, asynchronous copies, tensor cores.
 *
 * A launch is cut into clusters (mostly of one block), which the host's threads take in turn. A host thread, here a
 * worker, runs the fibers of a block until none is ready, then looks at the next block of the cluster, then at copies
 * that were put off; when nothing is left to do and threads still wait, the launch fails and says who waits for what.
 *
 * Shared variables are thread-local variables of the host. Their places are read from the program's own symbol table,
 * to fill them with NaN before a block and to put them aside where blocks of a cluster change. Addresses as kernels see
 * them: 1024.. dynamic shared memory, STATIC_BASE.. those variables, plus (rank+1) << 24 for another block's. */
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "backend/cuda/sm100.cuh"
#include "cuda_emu_tensor.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

__thread di_emu_thread *di_emu_now;

namespace {

enum : uint32_t {
    DYN_BASE = 1024,
    DYN_MAX = 227 * 1024,
    STATIC_BASE = 0x400000,
    RANK_SHIFT = 24,
    ADDRESS_MASK = 0xFFFFFF,
};
enum { THREADS_MAX = 1024, CLUSTER_MAX = 16, STACK_BYTES = 256 * 1024, PAGE = 4096, NAMED_BARRIERS = 16 };
enum : uint8_t { POISON = 0xFF, CANARY = 0x5C };
enum : uint64_t { MBAR_MAGIC = 0x6D6261725F6F6B21 }; /* what a barrier's word holds: overwriting it is seen */

struct schedule {
    uint64_t seed;
    bool is_late;
};
schedule schedule_of_environment() { /* DI_EMU_SCHEDULE=7,early */
    const char *text = getenv("DI_EMU_SCHEDULE");
    return {text ? strtoull(text, NULL, 10) : 0, !text || !strstr(text, "early")};
}
schedule the_schedule = schedule_of_environment();
std::atomic<int64_t> n_launches;

/* ---- changing stacks -------------------------------------------------------------------------------------------- */

extern "C" void di_emu_switch(void **save, void *load);
extern "C" void di_emu_start();
#if defined(__x86_64__)
__asm__(".text\n.globl di_emu_switch\n.hidden di_emu_switch\n.type di_emu_switch,@function\ndi_emu_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size di_emu_switch,.-di_emu_switch\n");
void *stack_prepare(uint8_t *top) {
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)15) - 1; /* as after a call: 8 off a multiple of 16 */
    *--sp = (void *)di_emu_start;
    for (int i = 0; i < 6; i++)
        *--sp = NULL;
    return sp;
}
#elif defined(__aarch64__)
__asm__(".text\n.globl di_emu_switch\n.hidden di_emu_switch\n.type di_emu_switch,%function\ndi_emu_switch:\n"
        "sub sp,sp,#160\nstp x19,x20,[sp]\nstp x21,x22,[sp,#16]\nstp x23,x24,[sp,#32]\nstp x25,x26,[sp,#48]\n"
        "stp x27,x28,[sp,#64]\nstp x29,x30,[sp,#80]\nstp d8,d9,[sp,#96]\nstp d10,d11,[sp,#112]\n"
        "stp d12,d13,[sp,#128]\nstp d14,d15,[sp,#144]\nmov x2,sp\nstr x2,[x0]\nmov sp,x1\n"
        "ldp x19,x20,[sp]\nldp x21,x22,[sp,#16]\nldp x23,x24,[sp,#32]\nldp x25,x26,[sp,#48]\n"
        "ldp x27,x28,[sp,#64]\nldp x29,x30,[sp,#80]\nldp d8,d9,[sp,#96]\nldp d10,d11,[sp,#112]\n"
        "ldp d12,d13,[sp,#128]\nldp d14,d15,[sp,#144]\nadd sp,sp,#160\nret\n"
        ".size di_emu_switch,.-di_emu_switch\n");
void *stack_prepare(uint8_t *top) {
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)15) - 20;
    for (int i = 0; i < 20; i++)
        sp[i] = NULL;
    sp[11] = (void *)di_emu_start; /* x30 */
    return sp;
}
#else
#error "say here how this processor changes stacks"
#endif

#if defined(__SSE2__)
uint64_t fp_flush() {
    unsigned mode = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(mode | 0x8040u); /* results and arguments */
    return mode;
}
void fp_restore(uint64_t mode) {
    __builtin_ia32_ldmxcsr((unsigned)mode);
}
#elif defined(__aarch64__)
uint64_t fp_flush() {
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(mode | 1 << 24));
    return mode;
}
void fp_restore(uint64_t mode) {
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
}
#endif

/* ---- shared variables -------------------------------------------------------------------------------------------- */

struct shared_variable {
    size_t offset, n_bytes; /* in the module's thread-local block */
};
struct shared_map {
    std::vector<shared_variable> variables;
    size_t n_bytes = 0; /* of the block */
};

/* Thread-local variables inside functions, by the names that C++ gives them: in this module those are the kernels'. */
void read_symbols(const char *path, shared_map *out) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    if (fd < 0)
        return;
    const uint8_t *file = fstat(fd, &st)
                              ? (const uint8_t *)MAP_FAILED
                              : (const uint8_t *)mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    close(fd);
    if (file == (const uint8_t *)MAP_FAILED)
        return;
    const auto *head = (const ElfW(Ehdr) *)file;
    const auto *sections = (const ElfW(Shdr) *)(file + head->e_shoff);
    for (int i = 0; head->e_shoff && i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB)
            continue;
        const auto *symbols = (const ElfW(Sym) *)(file + sections[i].sh_offset);
        const char *names = (const char *)file + sections[sections[i].sh_link].sh_offset;
        for (size_t k = 0; k < sections[i].sh_size / sizeof *symbols; k++)
            if (ELF64_ST_TYPE(symbols[k].st_info) == STT_TLS && symbols[k].st_shndx != SHN_UNDEF &&
                strncmp(names + symbols[k].st_name, "_ZZ", 3) == 0)
                out->variables.push_back({symbols[k].st_value, symbols[k].st_size});
    }
    munmap((void *)file, (size_t)st.st_size);
}

struct module_search {
    uintptr_t inside;
    std::string path;
    size_t tls_bytes;
    uint8_t *tls;
};
int module_visit(struct dl_phdr_info *info, size_t, void *ctx) {
    auto *s = (module_search *)ctx;
    bool is_here = false;
    size_t tls_bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const auto *p = &info->dlpi_phdr[i];
        uintptr_t from = info->dlpi_addr + p->p_vaddr;
        is_here = is_here || (p->p_type == PT_LOAD && s->inside >= from && s->inside < from + p->p_memsz);
        tls_bytes = p->p_type == PT_TLS ? p->p_memsz : tls_bytes;
    }
    if (!is_here)
        return 0;
    s->path = info->dlpi_name && info->dlpi_name[0] ? info->dlpi_name : "/proc/self/exe";
    s->tls_bytes = tls_bytes;
    s->tls = (uint8_t *)info->dlpi_tls_data;
    return 1;
}
module_search find_module() {
    di_emu_now = NULL; /* touches the block, so that it exists */
    module_search s = {(uintptr_t)&find_module, "", 0, NULL};
    dl_iterate_phdr(module_visit, &s);
    return s;
}
const shared_map &the_shared_map() {
    static const shared_map map = [] {
        shared_map m;
        module_search s = find_module();
        m.n_bytes = s.tls_bytes;
        read_symbols(s.path.c_str(), &m);
        return m;
    }();
    return map;
}

/* ---- state of a launch ------------------------------------------------------------------------------------------- */

struct block;

struct copy { /* put off until it is waited for; src NULL: zeroes */
    uint8_t *dst;
    const uint8_t *src;
    uint32_t n_read, n_bytes;
    uint32_t group;
};

struct fiber {
    di_emu_thread t;
    void *sp;
    block *b;
    bool is_done;
    const char *waits; /* for what; NULL = ready */
    uint32_t waits_at, waits_n;
    int result;             /* of a barrier */
    uint32_t cluster_phase; /* at arrival */
    bool has_arrived;       /* at the cluster's barrier */
    std::vector<copy> copies, stores;
    uint32_t copy_groups, store_groups;
    uint32_t n_multiplies;                 /* issued */
    std::vector<uint32_t> multiply_groups; /* multiplies issued at each commit */
    uint32_t groups_dropped;
#if defined(__SANITIZE_ADDRESS__)
    void *fake_stack;
#endif
};

struct meeting {
    const char *what;
    uint32_t mask, here;
    void *args[32];
};

struct named_barrier {
    uint32_t n_expected, n_here;
    int how, value;
    std::vector<fiber *> waiting;
};

struct mbar {
    uint32_t at, n_arrivals, n_pending, phase;
    int64_t n_bytes;
    std::vector<fiber *> waiting;
};

struct multiply {
    di_emu_multiply m;
    uint32_t n_here;
    float *d[128];
    uint32_t a[128][4];
};
struct warpgroup {
    std::deque<multiply> queue; /* from n_done on */
    uint32_t n_done;
    uint32_t n_waiting, target;
    std::vector<fiber *> waiting;
};

struct bulk { /* a load by the copy engine, an arrival that follows a thread's copies, or a step of the tensor core */
    block *b;
    uint32_t smem;
    const uint8_t *src;
    uint32_t n_bytes, bar;
    uint32_t blocks; /* mask of ranks; 0: its own */
    std::vector<copy> copies;
    bool is_tensor = false; /* the block's next one, whichever it is */
};

struct block {
    std::vector<fiber> fibers;
    uint8_t *stacks = NULL; /* THREADS_MAX */
    uint8_t *window = NULL; /* DYN_MAX rounded up, between two pages without access */
    uint8_t *dynamic = NULL;
    size_t smem = 0;
    uint32_t rank = 0, n_done = 0;
    std::deque<fiber *> ready;
    std::vector<meeting> meetings[THREADS_MAX / 32];
    named_barrier barriers[NAMED_BARRIERS];
    std::deque<mbar> mbars;
    warpgroup groups[THREADS_MAX / 128];
    tensor_memory tmem;
    std::deque<tensor_operation> tensor;
    fiber *tensor_issuer = NULL; /* of what is not committed yet */
    std::vector<uint8_t> aside;  /* its shared variables while another block of the cluster runs */
};

struct job {
    di_emu_launch_shape shape;
    const std::function<void()> *call;
    uint64_t n_clusters, number;
    schedule how;
    std::atomic<uint64_t> next;
    std::atomic<bool> has_failed;
    std::mutex lock;
    std::string message; /* lock: lock */
};

struct tile {
    float v[64 * 256];
};

/* All of a host thread's state. Not in thread-local variables of functions: those are taken for shared memory. */
struct worker {
    block blocks[CLUSTER_MAX];
    int n_blocks = 0;
    block *live = NULL; /* whose shared variables are in place */
    fiber *now = NULL;
    void *main_sp = NULL;
    job *j = NULL;
    uint8_t *tls = NULL;
    std::deque<bulk> put_off;
    uint32_t cluster_here = 0, cluster_phase = 0;
    std::vector<fiber *> cluster_waiting;
    uint64_t random = 0, idle_yields = 0;
    tile acc; /* of the multiply at work; its B as [k][256], its A as [k][64] */
    float b[32 * 256], turned[32 * 64];
    bool has_failed = false;
#if defined(__SANITIZE_ADDRESS__)
    void *main_fake = NULL;
    const void *main_bottom = NULL;
    size_t main_bytes = 0;
#endif
};
__thread worker *me;

uint64_t next_random() {
    uint64_t x = me->random += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* ---- fibers ------------------------------------------------------------------------------------------------------ */

uint8_t *fiber_stack(const fiber *f) {
    return f->b->stacks + (size_t)f->t.flat * STACK_BYTES;
}

void go(fiber *to) { /* NULL: the worker itself */
    fiber *from = me->now;
    if (to == from)
        return;
    void **save = from ? &from->sp : &me->main_sp;
    void *load = to ? to->sp : me->main_sp;
    me->now = to;
    di_emu_now = to ? &to->t : NULL;
#if defined(__SANITIZE_ADDRESS__)
    void **fake = from ? &from->fake_stack : &me->main_fake;
    __sanitizer_start_switch_fiber(from && from->is_done ? NULL : fake,
                                   to ? fiber_stack(to) + PAGE : (const uint8_t *)me->main_bottom,
                                   to ? STACK_BYTES - PAGE : me->main_bytes);
    di_emu_switch(save, load);
    __sanitizer_finish_switch_fiber(*fake, NULL, NULL);
#else
    di_emu_switch(save, load);
#endif
}

fiber *pop_ready(block *b) {
    if (b->ready.empty())
        return NULL;
    if (me->j->how.seed)
        std::swap(b->ready[next_random() % b->ready.size()], b->ready.front());
    fiber *f = b->ready.front();
    b->ready.pop_front();
    return f;
}

void wake(fiber *f) {
    f->waits = NULL;
    f->b->ready.push_back(f);
    me->idle_yields = 0;
}
void wake_all(std::vector<fiber *> *list) {
    for (fiber *f : *list)
        wake(f);
    list->clear();
}
/* Until somebody wakes it. */
void sleep_on(const char *what, uint32_t at, uint32_t n) {
    fiber *f = me->now;
    f->waits = what;
    f->waits_at = at;
    f->waits_n = n;
    go(pop_ready(f->b));
}

void cluster_check();
void run_copy(const copy *c);

extern "C" void di_emu_start() {
#if defined(__SANITIZE_ADDRESS__)
    const void *bottom;
    size_t n_bytes;
    __sanitizer_finish_switch_fiber(NULL, &bottom, &n_bytes);
    if (!me->main_bottom) {
        me->main_bottom = bottom;
        me->main_bytes = n_bytes;
    }
#endif
    (*me->j->call)();
    fiber *f = me->now;
    for (const copy &c : f->copies)
        run_copy(&c);
    DI_EMU_CHECK(f->stores.empty(), "thread ends while its bulk stores are under way");
    if (!f->b->groups[f->t.flat / 128].queue.empty() && f->n_multiplies > f->b->groups[f->t.flat / 128].n_done)
        di_emu_fail("thread ends while its multiplies are under way");
    f->is_done = true;
    f->b->n_done++;
    cluster_check();
    go(pop_ready(f->b));
    abort(); /* nobody goes on with a fiber that is done */
}

/* ---- one cluster ------------------------------------------------------------------------------------------------- */

size_t round_up(size_t n, size_t to) {
    return (n + to - 1) / to * to;
}

void block_memory(block *b) {
    if (b->stacks)
        return;
    b->stacks = (uint8_t *)mmap(NULL, (size_t)THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    b->window =
        (uint8_t *)mmap(NULL, DYN_MAX + 1024 + 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->stacks == MAP_FAILED || b->window == MAP_FAILED) {
        fprintf(stderr, "emulation: no memory for stacks\n");
        abort();
    }
    for (size_t i = 0; i < THREADS_MAX; i++) /* an overflow faults */
        (void)mprotect(b->stacks + i * STACK_BYTES, PAGE, PROT_NONE);
    (void)mprotect(b->window, PAGE, PROT_NONE);
    (void)mprotect(b->window + DYN_MAX + 1024 + PAGE, PAGE, PROT_NONE);
}

void block_init(block *b, uint32_t rank, dim3 index) {
    const di_emu_launch_shape &s = me->j->shape;
    unsigned n = s.block.x * s.block.y * s.block.z;
    block_memory(b);
    b->rank = rank;
    b->n_done = 0;
    b->smem = s.smem;
    /* Its end lies at the page without access. */
    b->dynamic = b->window + PAGE + DYN_MAX + 1024 - round_up(s.smem, 1024);
    memset(b->dynamic, POISON, s.smem);
    memset(b->dynamic + s.smem, CANARY, round_up(s.smem, 1024) - s.smem);
    b->ready.clear();
    b->mbars.clear();
    b->tensor.clear();
    b->tensor_issuer = NULL;
    b->tmem.n = 0;
    b->tmem.is_done = false;
    for (auto &m : b->meetings)
        m.clear();
    for (auto &bar : b->barriers) {
        bar.n_here = 0;
        bar.waiting.clear();
    }
    for (auto &g : b->groups) {
        g.queue.clear();
        g.n_done = g.n_waiting = 0;
        g.waiting.clear();
    }
    b->fibers.resize(n);
    for (unsigned i = 0; i < n; i++) {
        fiber *f = &b->fibers[i];
        f->b = b;
        f->t = {{i % s.block.x, i / s.block.x % s.block.y, i / (s.block.x * s.block.y)},
                {index.x, index.y, index.z},
                s.block,
                s.grid,
                i % 32,
                i / 32,
                i};
        f->is_done = false;
        f->waits = NULL;
        f->has_arrived = false;
        f->copies.clear();
        f->stores.clear();
        f->multiply_groups.clear();
        f->copy_groups = f->store_groups = f->n_multiplies = f->groups_dropped = 0;
        /* Stacks start at different places of a cache's sets. */
        f->sp = stack_prepare(fiber_stack(f) + STACK_BYTES - i * 1088 % 16384);
#if defined(__SANITIZE_ADDRESS__)
        f->fake_stack = NULL;
        /* Who ran here last may have left without returning. */
        __asan_unpoison_memory_region(fiber_stack(f) + PAGE, STACK_BYTES - PAGE);
#endif
        b->ready.push_back(f);
    }
}

void shared_poison() {
    for (const shared_variable &v : the_shared_map().variables)
        memset(me->tls + v.offset, POISON, v.n_bytes);
}
/* Puts the shared variables of b in place. */
void make_live(block *b) {
    const auto &variables = the_shared_map().variables;
    if (me->live == b)
        return;
    if (me->live && me->n_blocks > 1) {
        me->live->aside.resize(the_shared_map().n_bytes);
        for (const shared_variable &v : variables)
            memcpy(me->live->aside.data() + v.offset, me->tls + v.offset, v.n_bytes);
        for (const shared_variable &v : variables)
            memcpy(me->tls + v.offset, b->aside.data() + v.offset, v.n_bytes);
    }
    me->live = b;
}

void run_bulk(size_t i);

void report_deadlock() {
    std::string text = "threads wait for ever:";
    for (int k = 0; k < me->n_blocks; k++) {
        block *b = &me->blocks[k];
        std::vector<const fiber *> kinds;
        std::vector<unsigned> counts;
        for (const fiber &f : b->fibers) {
            if (!f.waits)
                continue;
            size_t i = 0;
            while (i < kinds.size() && (strcmp(kinds[i]->waits, f.waits) != 0 || kinds[i]->waits_at != f.waits_at ||
                                        kinds[i]->waits_n != f.waits_n))
                i++;
            if (i == kinds.size()) {
                kinds.push_back(&f);
                counts.push_back(0);
            }
            counts[i]++;
        }
        char line[256];
        if (me->n_blocks > 1) {
            snprintf(line, sizeof line, " [rank %d]", k);
            text += line;
        }
        for (size_t i = 0; i < kinds.size() && i < 12; i++) {
            snprintf(line, sizeof line, "%s %u at %s (0x%x, %u) from thread %u on", i ? "," : "", counts[i],
                     kinds[i]->waits, kinds[i]->waits_at, kinds[i]->waits_n, kinds[i]->t.flat);
            text += line;
        }
        snprintf(line, sizeof line, "; %u of %zu have ended", b->n_done, b->fibers.size());
        text += line;
    }
    std::lock_guard<std::mutex> hold(me->j->lock);
    me->has_failed = true;
    if (!me->j->has_failed.exchange(true))
        me->j->message = text;
}

void fail_after(const char *what) {
    std::lock_guard<std::mutex> hold(me->j->lock);
    me->has_failed = true;
    if (!me->j->has_failed.exchange(true))
        me->j->message = what;
}

void run_cluster(uint64_t number) {
    const di_emu_launch_shape &s = me->j->shape;
    dim3 c = s.cluster, n = {s.grid.x / c.x, s.grid.y / c.y, s.grid.z / c.z};
    dim3 first = {(unsigned)(number % n.x) * c.x, (unsigned)(number / n.x % n.y) * c.y,
                  (unsigned)(number / n.x / n.y) * c.z};
    me->n_blocks = (int)(c.x * c.y * c.z);
    me->live = NULL;
    me->put_off.clear();
    me->cluster_here = me->cluster_phase = 0;
    me->cluster_waiting.clear();
    me->random = me->j->how.seed * 0x2545F4914F6CDD1Du + number + (me->j->number << 32);
    shared_poison();
    for (int k = 0; k < me->n_blocks; k++) {
        block *b = &me->blocks[k];
        unsigned u = (unsigned)k;
        block_init(b, u, {first.x + u % c.x, first.y + u / c.x % c.y, first.z + u / (c.x * c.y)});
        if (me->n_blocks > 1)
            b->aside.assign(the_shared_map().n_bytes, POISON);
    }
    for (;;) {
        bool is_busy = false, is_done = true;
        for (int k = 0; k < me->n_blocks; k++) {
            block *b = &me->blocks[k];
            fiber *f = pop_ready(b);
            if (f) {
                is_busy = true;
                make_live(b);
                go(f);
                if (me->has_failed)
                    return;
            }
            is_done = is_done && b->n_done == b->fibers.size();
        }
        if (is_done)
            break;
        if (is_busy)
            continue;
        if (me->put_off.empty()) {
            report_deadlock();
            return;
        }
        run_bulk(me->j->how.seed ? next_random() % me->put_off.size() : 0);
        if (me->has_failed)
            return;
    }
    if (!me->put_off.empty())
        fail_after("a block ends while bulk loads into it, or its tensor core's work, are under way");
    for (int k = 0; k < me->n_blocks; k++)
        if (me->blocks[k].tmem.n)
            fail_after("a block ends with tensor memory that it has not given back");
    for (int k = 0; k < me->n_blocks; k++)
        for (size_t i = me->blocks[k].smem; i < round_up(me->blocks[k].smem, 1024); i++)
            if (me->blocks[k].dynamic[i] != CANARY) {
                char text[128];
                snprintf(text, sizeof text, "dynamic shared memory of %zu bytes is written at byte %zu",
                         me->blocks[k].smem, i);
                fail_after(text);
                return;
            }
}

/* ---- workers ----------------------------------------------------------------------------------------------------- */

void work(job *j) {
    if (!me) {
        me = new worker;
        me->tls = find_module().tls;
    }
    me->j = j;
    me->has_failed = false;
    uint64_t mode = fp_flush();
    for (uint64_t i; !j->has_failed && (i = j->next.fetch_add(1)) < j->n_clusters;)
        run_cluster(i);
    fp_restore(mode);
    me->now = NULL;
    di_emu_now = NULL;
}

struct crew { /* the threads beside the caller of launches */
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t call = PTHREAD_COND_INITIALIZER, rest = PTHREAD_COND_INITIALIZER;
    int n_threads = 0, n_wanted = 0, n_busy = 0;
    uint64_t round = 0;
    job *j = NULL;
};
crew the_crew;
std::mutex launching;

void *crew_main(void *) {
    uint64_t seen = 0;
    pthread_mutex_lock(&the_crew.lock);
    for (;;) {
        while (the_crew.round == seen || !the_crew.j)
            pthread_cond_wait(&the_crew.call, &the_crew.lock);
        seen = the_crew.round;
        job *j = the_crew.j;
        the_crew.n_busy++;
        pthread_mutex_unlock(&the_crew.lock);
        work(j);
        pthread_mutex_lock(&the_crew.lock);
        if (--the_crew.n_busy == 0)
            pthread_cond_signal(&the_crew.rest);
    }
    return NULL;
}

void crew_run(job *j) {
    int wanted = the_crew.n_wanted ? the_crew.n_wanted : std::min((int)sysconf(_SC_NPROCESSORS_ONLN), 16);
    uint64_t n_threads = j->n_clusters * j->shape.block.x * j->shape.block.y * j->shape.block.z;
    if (wanted > 1 && j->n_clusters > 1 && n_threads > 256) {
        pthread_mutex_lock(&the_crew.lock);
        for (; the_crew.n_threads < wanted - 1; the_crew.n_threads++) {
            pthread_t t;
            if (pthread_create(&t, NULL, crew_main, NULL))
                break;
            pthread_detach(t);
        }
        the_crew.j = j;
        the_crew.round++;
        pthread_cond_broadcast(&the_crew.call);
        pthread_mutex_unlock(&the_crew.lock);
    }
    work(j);
    pthread_mutex_lock(&the_crew.lock);
    the_crew.j = NULL; /* who has not come yet stays away */
    while (the_crew.n_busy > 0)
        pthread_cond_wait(&the_crew.rest, &the_crew.lock);
    pthread_mutex_unlock(&the_crew.lock);
}

} // namespace

/* ---- launch and failure ------------------------------------------------------------------------------------------ */

static cudaError_t last_error;
static std::string last_failure;
static bool is_quiet;
cudaError_t di_emu_run(const di_emu_launch_shape &shape, const std::function<void()> &call);

[[noreturn]] void di_emu_fail(const char *format, ...) {
    char text[512], where[160];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (!me || !me->j) {
        fprintf(stderr, "emulation, outside a kernel: %s\n", text);
        abort();
    }
    where[0] = 0;
    if (di_emu_now) {
        const di_emu_thread *t = di_emu_now;
        snprintf(where, sizeof where, "block (%u,%u,%u) thread (%u,%u,%u): ", t->block.x, t->block.y, t->block.z,
                 t->thread.x, t->thread.y, t->thread.z);
    }
    {
        std::lock_guard<std::mutex> hold(me->j->lock);
        me->has_failed = true;
        if (!me->j->has_failed.exchange(true))
            me->j->message = std::string(where) + text;
    }
    if (!me->now)
        abort(); /* a copy that was put off: its arguments were checked */
    go(NULL);
    abort();
}

cudaError_t di_emu_run(const di_emu_launch_shape &shape, const std::function<void()> &call) {
    const dim3 &g = shape.grid, &b = shape.block, &c = shape.cluster;
    std::lock_guard<std::mutex> hold(launching);
    job j;
    j.shape = shape;
    j.call = &call;
    j.how = the_schedule;
    j.number = (uint64_t)n_launches++;
    j.next = 0;
    j.has_failed = false;
    uint64_t n_threads = (uint64_t)b.x * b.y * b.z, cluster = (uint64_t)c.x * c.y * c.z;
    bool is_fine = n_threads >= 1 && n_threads <= THREADS_MAX && b.z <= 64 && g.x >= 1 && g.y >= 1 && g.z >= 1 &&
                   g.x <= 0x7FFFFFFF && g.y <= 65535 && g.z <= 65535 && shape.smem <= DYN_MAX && cluster >= 1 &&
                   cluster <= CLUSTER_MAX && g.x % c.x == 0 && g.y % c.y == 0 && g.z % c.z == 0;
    char text[256];
    if (!is_fine) {
        snprintf(text, sizeof text, "grid (%u,%u,%u), block (%u,%u,%u), cluster of %u, %zu bytes: not a launch", g.x,
                 g.y, g.z, b.x, b.y, b.z, (unsigned)cluster, shape.smem);
        j.message = text;
        j.has_failed = true;
    } else {
        j.n_clusters = (uint64_t)g.x * g.y * g.z / cluster;
        crew_run(&j);
    }
    if (!j.has_failed)
        return cudaSuccess;
    last_failure = std::string("kernel ") + shape.name + ": " + j.message;
    if (!is_quiet)
        fprintf(stderr, "emulation: %s\n", last_failure.c_str());
    last_error = is_fine ? cudaErrorLaunchFailure : cudaErrorInvalidValue;
    return last_error;
}

extern "C" void di_emu_set_schedule(uint64_t seed, bool is_late) {
    the_schedule = {seed, is_late};
}
extern "C" void di_emu_set_threads(int n_threads) {
    the_crew.n_wanted = n_threads;
}
extern "C" int64_t di_emu_launches(void) {
    return n_launches;
}
extern "C" const char *di_emu_last_failure(void) {
    return last_failure.c_str();
}
extern "C" void di_emu_set_quiet(bool quiet) {
    is_quiet = quiet;
}
cudaError_t cudaGetLastError() {
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return e;
}
cudaError_t cudaPeekAtLastError() {
    return last_error;
}

/* ---- threads of a warp and of a block ------------------------------------------------------------------------------
 */

void di_emu_yield() {
    fiber *f = me->now;
    if (!me->put_off.empty())
        run_bulk(me->j->how.seed ? next_random() % me->put_off.size() : 0);
    DI_EMU_CHECK(++me->idle_yields < 5000000, "threads look again and again, and nothing happens");
    f->b->ready.push_back(f);
    go(me->n_blocks > 1 ? NULL : pop_ready(f->b));
}

void *di_emu_dynamic_shared() {
    return me->now->b->dynamic;
}

void di_emu_meet(const char *what, uint32_t mask, void *arg, di_emu_meet_fn all) {
    fiber *f = me->now;
    block *b = f->b;
    unsigned lane = f->t.lane, warp = f->t.warp, n_lanes = std::min(32u, (unsigned)b->fibers.size() - warp * 32);
    DI_EMU_CHECK(mask >> lane & 1, "%s with mask %08x: the caller, lane %u, is not in it", what, mask, lane);
    if (n_lanes < 32)
        mask &= (1u << n_lanes) - 1;
    auto &list = b->meetings[warp];
    meeting *m = NULL;
    for (meeting &other : list)
        m = other.here && other.mask == mask ? &other : m;
    if (!m) {
        for (meeting &other : list)
            m = !other.here ? &other : m;
        if (!m) {
            list.push_back({});
            m = &list.back();
        }
        *m = {what, mask, 0, {}};
    }
    DI_EMU_CHECK(m->what == what || strcmp(m->what, what) == 0, "lanes of warp %u meet at %s and at %s", warp, m->what,
                 what);
    m->args[lane] = arg;
    m->here |= 1u << lane;
    if (m->here != mask) {
        sleep_on(what, mask, warp);
        return;
    }
    if (all)
        all(m->args, mask);
    m->here = 0;
    for (unsigned l = 0; l < n_lanes; l++)
        if (l != lane && mask >> l & 1)
            wake(&b->fibers[warp * 32 + l]);
}

/* True: the caller came last, everyone goes on. */
static bool barrier_arrive(unsigned id, unsigned n, int how, int value) {
    block *b = me->now->b;
    DI_EMU_CHECK(id < NAMED_BARRIERS, "barrier %u: a block has %d", id, NAMED_BARRIERS);
    DI_EMU_CHECK(id == 0 || n % 32 == 0, "barrier %u of %u threads: not of whole warps", id, n);
    n = n ? n : (unsigned)b->fibers.size();
    named_barrier *bar = &b->barriers[id];
    if (bar->n_here == 0)
        bar->n_expected = n, bar->how = how, bar->value = how == 1;
    DI_EMU_CHECK(bar->n_expected == n, "barrier %u: threads come for %u and for %u", id, bar->n_expected, n);
    bar->value = bar->how == 0 ? bar->value + value : bar->how == 1 ? bar->value & value : bar->value | value;
    if (++bar->n_here < n)
        return false;
    bar->n_here = 0;
    me->now->result = bar->value;
    for (fiber *f : bar->waiting)
        f->result = bar->value;
    wake_all(&bar->waiting);
    return true;
}
int di_emu_barrier(unsigned id, unsigned n_threads, int how, int value) {
    fiber *f = me->now;
    if (!barrier_arrive(id, n_threads, how, value)) {
        f->b->barriers[id].waiting.push_back(f);
        sleep_on(id ? "a named barrier" : "__syncthreads", id, n_threads);
    }
    return f->result;
}
void di_emu_barrier_arrive(unsigned id, unsigned n_threads) {
    DI_EMU_CHECK(id != 0, "arriving at barrier 0");
    (void)barrier_arrive(id, n_threads, 0, 0);
}

/* ---- addresses of shared memory ------------------------------------------------------------------------------------
 */

uint32_t di_emu_address(const void *p) {
    block *b = me->now->b;
    const uint8_t *at = (const uint8_t *)p;
    if (at >= b->dynamic && at <= b->dynamic + b->smem)
        return DYN_BASE + (uint32_t)(at - b->dynamic);
    DI_EMU_CHECK(at >= me->tls && at < me->tls + the_shared_map().n_bytes, "%p is not in shared memory", p);
    return STATIC_BASE + (uint32_t)(at - me->tls);
}

namespace {

uint8_t *pointer_in(block *b, uint32_t address, uint32_t n_bytes) {
    uint32_t a = address & ADDRESS_MASK;
    if (a >= STATIC_BASE) {
        DI_EMU_CHECK(a - STATIC_BASE + n_bytes <= the_shared_map().n_bytes, "shared address 0x%x: beyond", address);
        return (me->live == b ? me->tls : b->aside.data()) + (a - STATIC_BASE);
    }
    DI_EMU_CHECK(a >= DYN_BASE && a - DYN_BASE + n_bytes <= b->smem,
                 "shared address 0x%x, %u bytes: outside the %zu bytes of dynamic shared memory", address, n_bytes,
                 b->smem);
    return b->dynamic + (a - DYN_BASE);
}
block *block_of(uint32_t address) {
    uint32_t rank = address >> RANK_SHIFT;
    if (!rank)
        return me->now->b;
    DI_EMU_CHECK((int)rank <= me->n_blocks, "shared address 0x%x: rank %u of %d", address, rank - 1, me->n_blocks);
    return &me->blocks[rank - 1];
}

} // namespace

void *di_emu_pointer(uint32_t address, uint32_t n_bytes) {
    DI_EMU_CHECK(address % n_bytes == 0, "shared address 0x%x: misaligned for %u bytes", address, n_bytes);
    return pointer_in(block_of(address), address, n_bytes);
}
uint32_t di_emu_mapa(uint32_t smem, uint32_t rank) {
    DI_EMU_CHECK((int)rank < me->n_blocks, "block %u of a cluster of %d", rank, me->n_blocks);
    return (smem & ADDRESS_MASK) | (rank + 1) << RANK_SHIFT;
}

/* ---- clusters ------------------------------------------------------------------------------------------------------
 */

uint32_t di_emu_cluster_rank() {
    return me->now->b->rank;
}
uint32_t di_emu_cluster_size() {
    return (uint32_t)me->n_blocks;
}
namespace {
/* Threads that have ended count as arrived. */
void cluster_check() {
    uint32_t n = 0;
    for (int k = 0; k < me->n_blocks; k++)
        n += (uint32_t)me->blocks[k].fibers.size() - me->blocks[k].n_done;
    if (me->cluster_here == 0 || me->cluster_here < n)
        return;
    me->cluster_here = 0;
    me->cluster_phase++;
    wake_all(&me->cluster_waiting);
}
} // namespace
void di_emu_cluster_arrive() {
    fiber *f = me->now;
    DI_EMU_CHECK(!f->has_arrived, "arriving twice at the cluster's barrier");
    f->has_arrived = true;
    f->cluster_phase = me->cluster_phase;
    me->cluster_here++;
    cluster_check();
}
void di_emu_cluster_wait() {
    fiber *f = me->now;
    DI_EMU_CHECK(f->has_arrived, "waiting at the cluster's barrier without having arrived");
    f->has_arrived = false;
    while (f->cluster_phase == me->cluster_phase) {
        me->cluster_waiting.push_back(f);
        sleep_on("the cluster's barrier", 0, 0);
    }
}

/* ---- barriers in memory --------------------------------------------------------------------------------------------
 */

namespace {

mbar *mbar_find(block *b, uint32_t address) {
    uint32_t at = address & ADDRESS_MASK;
    uint64_t word;
    for (mbar &m : b->mbars)
        if (m.at == at) {
            memcpy(&word, pointer_in(b, at, 8), 8);
            DI_EMU_CHECK(word == MBAR_MAGIC, "mbarrier at 0x%x: its memory was overwritten", at);
            return &m;
        }
    di_emu_fail("mbarrier at 0x%x: not initialised", at);
}
void mbar_check(mbar *m) {
    if (m->n_pending || m->n_bytes)
        return;
    m->phase++;
    m->n_pending = m->n_arrivals;
    wake_all(&m->waiting);
}
void mbar_arrive(mbar *m) {
    DI_EMU_CHECK(m->n_pending > 0, "mbarrier at 0x%x: more arrivals than the %u of a phase", m->at, m->n_arrivals);
    m->n_pending--;
    mbar_check(m);
}

} // namespace

void di_emu_mbar_init(uint32_t bar, uint32_t n_arrivals) {
    block *b = me->now->b;
    DI_EMU_CHECK(bar % 8 == 0 && n_arrivals >= 1 && n_arrivals < 1u << 20, "mbarrier at 0x%x for %u arrivals", bar,
                 n_arrivals);
    for (mbar &m : b->mbars)
        DI_EMU_CHECK(m.at != bar, "mbarrier at 0x%x: initialised again", bar);
    uint64_t word = MBAR_MAGIC;
    memcpy(pointer_in(b, bar, 8), &word, 8);
    b->mbars.push_back({bar, n_arrivals, n_arrivals, 0, 0, {}});
}
void di_emu_mbar_inval(uint32_t bar) {
    block *b = me->now->b;
    mbar *m = mbar_find(b, bar);
    DI_EMU_CHECK(m->waiting.empty(), "mbarrier at 0x%x: invalidated under a thread that waits", bar);
    b->mbars.erase(b->mbars.begin() + (m - &b->mbars[0]));
    memset(pointer_in(b, bar, 8), POISON, 8);
}
void di_emu_mbar_arrive(uint32_t bar, bool counts, int64_t n_bytes) {
    mbar *m = mbar_find(block_of(bar), bar);
    m->n_bytes += n_bytes;
    DI_EMU_CHECK(m->n_bytes < 1 << 20, "mbarrier at 0x%x: %lld bytes announced, at most 2^20 - 1", bar,
                 (long long)m->n_bytes);
    if (counts)
        mbar_arrive(m);
}
bool di_emu_mbar_test(uint32_t bar, uint32_t parity) {
    mbar *m = mbar_find(me->now->b, bar);
    if ((m->phase & 1) != (parity & 1))
        return true;
    di_emu_yield();
    m = mbar_find(me->now->b, bar);
    return (m->phase & 1) != (parity & 1);
}
void di_emu_mbar_wait(uint32_t bar, uint32_t parity) {
    for (;;) {
        mbar *m = mbar_find(me->now->b, bar);
        if ((m->phase & 1) != (parity & 1))
            return;
        m->waiting.push_back(me->now);
        sleep_on("an mbarrier", bar, parity);
    }
}

/* ---- copies --------------------------------------------------------------------------------------------------------
 */

namespace {

void run_copy(const copy *c) {
    memcpy(c->dst, c->src, c->n_read);
    memset(c->dst + c->n_read, 0, c->n_bytes - c->n_read);
}
void run_copies(std::vector<copy> *list, uint32_t before_group) {
    size_t keep = 0;
    for (copy &c : *list)
        if (c.group < before_group)
            run_copy(&c);
        else
            (*list)[keep++] = c;
    list->resize(keep);
}

void run_tensor(block *b);

void run_bulk(size_t i) {
    bulk k = std::move(me->put_off[i]);
    me->put_off.erase(me->put_off.begin() + (ptrdiff_t)i);
    if (k.is_tensor) {
        run_tensor(k.b);
        return;
    }
    for (const copy &c : k.copies)
        run_copy(&c);
    if (!k.src) {
        mbar_arrive(mbar_find(k.b, k.bar));
        return;
    }
    for (int r = 0; r < me->n_blocks; r++) {
        block *b = &me->blocks[r];
        if (k.blocks ? !(k.blocks >> r & 1) : b != k.b)
            continue;
        memcpy(pointer_in(b, k.smem, k.n_bytes), k.src, k.n_bytes);
        mbar *m = mbar_find(b, k.bar);
        m->n_bytes -= k.n_bytes;
        mbar_check(m);
    }
}

} // namespace

void di_emu_cp(uint32_t smem, const void *global, uint32_t n_read, uint32_t n_bytes) {
    fiber *f = me->now;
    DI_EMU_CHECK(n_read <= n_bytes, "copy of %u bytes of %u", n_read, n_bytes);
    DI_EMU_CHECK(smem % n_bytes == 0 && (uintptr_t)global % n_bytes == 0,
                 "copy of %u bytes from %p to 0x%x: misaligned", n_bytes, global, smem);
    copy c = {pointer_in(f->b, smem, n_bytes), (const uint8_t *)global, n_read, n_bytes, f->copy_groups};
    if (me->j->how.is_late)
        f->copies.push_back(c);
    else
        run_copy(&c);
}
void di_emu_cp_commit() {
    me->now->copy_groups++;
}
void di_emu_cp_wait(unsigned n) {
    fiber *f = me->now;
    if (f->copy_groups > n)
        run_copies(&f->copies, f->copy_groups - n);
}
void di_emu_mbar_arrive_cp(uint32_t bar) {
    fiber *f = me->now;
    (void)mbar_find(f->b, bar);
    me->put_off.push_back({f->b, 0, NULL, 0, bar, 0, std::move(f->copies)});
    f->copies.clear();
    if (!me->j->how.is_late)
        run_bulk(me->put_off.size() - 1);
}

void di_emu_bulk_load(uint32_t smem, const void *global, uint32_t n_bytes, uint32_t bar, uint32_t blocks) {
    block *b = me->now->b;
    DI_EMU_CHECK(smem % 16 == 0 && (uintptr_t)global % 16 == 0 && n_bytes % 16 == 0 && n_bytes,
                 "bulk load of %u bytes from %p to 0x%x: not by 16", n_bytes, global, smem);
    DI_EMU_CHECK(!(blocks >> me->n_blocks), "bulk load to blocks %x of a cluster of %d", blocks, me->n_blocks);
    for (int r = 0; r < me->n_blocks; r++)
        if (blocks ? blocks >> r & 1 : &me->blocks[r] == b) {
            (void)pointer_in(&me->blocks[r], smem, n_bytes);
            (void)mbar_find(&me->blocks[r], bar);
        }
    me->put_off.push_back({b, smem, (const uint8_t *)global, n_bytes, bar, blocks, {}});
    if (!me->j->how.is_late)
        run_bulk(me->put_off.size() - 1);
}
void di_emu_bulk_store(void *global, uint32_t smem, uint32_t n_bytes) {
    fiber *f = me->now;
    DI_EMU_CHECK(smem % 16 == 0 && (uintptr_t)global % 16 == 0 && n_bytes % 16 == 0 && n_bytes,
                 "bulk store of %u bytes from 0x%x to %p: not by 16", n_bytes, smem, global);
    copy c = {(uint8_t *)global, pointer_in(f->b, smem, n_bytes), n_bytes, n_bytes, f->store_groups};
    if (me->j->how.is_late)
        f->stores.push_back(c);
    else
        run_copy(&c);
}
void di_emu_bulk_commit() {
    me->now->store_groups++;
}
void di_emu_bulk_wait(unsigned n) {
    fiber *f = me->now;
    if (f->store_groups > n)
        run_copies(&f->stores, f->store_groups - n);
}

/* ---- tensor cores --------------------------------------------------------------------------------------------------
 */

float di_emu_e4m3_to_f32(uint8_t code) {
    int e = code >> 3 & 15, m = code & 7;
    float v = (code & 127) == 127 ? NAN : e ? ldexpf((float)(8 + m), e - 10) : ldexpf((float)m, -9);
    return code & 128 ? -v : v;
}
uint8_t di_emu_f32_to_e4m3(float f) {
    uint8_t sign = std::signbit(f) ? 128 : 0;
    float a = fabsf(f);
    if (f != f)
        return 127;
    if (a >= 448.0f)
        return (uint8_t)(sign | 126);
    if (a < 0x1p-12f)
        return sign;
    int e;
    (void)frexpf(a, &e); /* a = [0.5, 1) * 2^e */
    int step = std::max(e - 4, -9);
    int m = (int)nearbyintf(ldexpf(a, -step)); /* in units of 2^step; at most 16 */
    int code = step == -9 ? m : (step + 9) * 8 + m;
    return (uint8_t)(sign | std::min(code, 126));
}
uint16_t di_emu_mul_bf16(uint16_t a, uint16_t b) {
    int ea = a >> 7 & 255, eb = b >> 7 & 255;
    if (ea && eb && ea + eb > 140 && ea + eb < 370) /* exact in float, and normal */
        return __float2bfloat16(__uint_as_float((uint32_t)a << 16) * __uint_as_float((uint32_t)b << 16)).x;
    auto value = [](uint16_t h) { /* in double, where nothing is flushed */
                                  int e = h >> 7 & 255, m = h & 127;
                                  double v = e == 255 ? (m ? (double)NAN : (double)INFINITY)
                                             : e      ? ldexp(128 + m, e - 134)
                                                      : ldexp(m, -133);
                                  return h >> 15 ? -v : v;
    };
    double v = value(a) * value(b), size = fabs(v);
    uint16_t sign = std::signbit(v) ? 0x8000 : 0;
    if (v != v)
        return 0x7FFF;
    if (size >= 0x1.FFp127)
        return (uint16_t)(sign | 0x7F80);
    int e;
    (void)frexp(size, &e);
    int step = size == 0.0 ? -133 : std::max(e - 8, -133), m = (int)nearbyint(ldexp(size, -step));
    return (uint16_t)(sign | (step == -133 ? m : (step + 133) * 128 + m));
}
float di_emu_f16_to_f32(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf((float)(1024 + m), e - 25) : ldexpf((float)m, -24);
    return h >> 15 ? -v : v;
}
uint16_t di_emu_f32_to_f16(float f) {
    uint16_t sign = std::signbit(f) ? 0x8000 : 0;
    float a = fabsf(f);
    if (f != f)
        return 0x7FFF;
    if (a >= 65520.0f)
        return (uint16_t)(sign | 0x7C00);
    if (a < 0x1p-26f)
        return sign;
    int e;
    (void)frexpf(a, &e);
    int step = std::max(e - 11, -24), m = (int)nearbyintf(ldexpf(a, -step));
    return (uint16_t)(sign | (step == -24 ? m : (step + 24) * 1024 + m));
}

namespace {

const float *e4m3_table() {
    static const struct table {
        float v[256];
        table() {
            for (int i = 0; i < 256; i++)
                v[i] = di_emu_e4m3_to_f32((uint8_t)i);
        }
    } t;
    return t.v;
}

/* Byte address that the hardware reads for an element of an operand. mn: along m or n; k: in bytes when K-major, else
 * in elements of two bytes. */
struct operand {
    uint32_t start, along, across, mode, width, mask;
    explicit operand(uint64_t desc) {
        static const uint32_t widths[4] = {16, 128, 64, 32};
        start = (uint32_t)(desc & 0x3FFF) << 4;
        along = (uint32_t)(desc >> 16 & 0x3FFF) << 4;
        across = (uint32_t)(desc >> 32 & 0x3FFF) << 4;
        mode = (uint32_t)(desc >> 62);
        width = widths[mode];
        mask = width / 16 - 1; /* chunks that the row's number is mixed into */
        DI_EMU_CHECK((desc >> 49 & 7) == 0, "descriptor %016llx: base offset is not modelled",
                     (unsigned long long)desc);
    }
    uint32_t swizzled(uint32_t a) const {
        return a ^ ((a >> 7 & mask) << 4);
    }
    uint32_t k_major(uint32_t mn, uint32_t byte) const {
        uint32_t a = start + mn / 8 * across + mn % 8 * width;
        return mode ? swizzled(a + byte) : a + byte / 16 * along + byte % 16;
    }
    uint32_t mn_major(uint32_t mn, uint32_t k) const {
        uint32_t row = width / 2; /* elements */
        if (!mode)
            return start + mn / 8 * across + k / 8 * along + k % 8 * 16 + mn % 8 * 2;
        return swizzled(start + mn / row * along + k / 8 * across + k % 8 * width + mn % row * 2);
    }
};

float bf16_at(const uint8_t *p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return __uint_as_float((uint32_t)h << 16);
}

/* out[k][mn], mn < n, in floats; row_stride between k. By chunks of 16 bytes, inside which nothing moves. */
/* The values of bytes: of E4M3 codes, NULL where elements are bf16, or of integers. */
const float *table_of(const di_emu_multiply &m) {
    static const std::vector<float> integers = [] {
        std::vector<float> v(256);
        for (size_t i = 0; i < v.size(); i++)
            v[i] = (float)(int8_t)i;
        return v;
    }();
    return m.is_s8 ? integers.data() : m.is_e4m3 ? e4m3_table() : NULL;
}
void operand_read(block *b, uint64_t desc, int n, const float *table, bool is_mn, float *out, size_t row_stride) {
    operand o(desc);
    int n_rows = is_mn ? 16 : n, n_chunks = is_mn ? n / 8 : 2;
    for (int i = 0; i < n_rows; i++)
        for (int c = 0; c < n_chunks; c++) {
            uint32_t at = is_mn ? o.mn_major((uint32_t)c * 8, (uint32_t)i) : o.k_major((uint32_t)i, (uint32_t)c * 16);
            const uint8_t *p = pointer_in(b, at, 16);
            if (is_mn)
                for (int e = 0; e < 8; e++)
                    out[(size_t)i * row_stride + (size_t)(c * 8 + e)] = bf16_at(p + 2 * e);
            else if (table)
                for (int e = 0; e < 16; e++)
                    out[(size_t)(c * 16 + e) * row_stride + (size_t)i] = table[p[e]];
            else
                for (int e = 0; e < 8; e++)
                    out[(size_t)(c * 8 + e) * row_stride + (size_t)i] = bf16_at(p + 2 * e);
        }
}

/* Rows of A that a warp's threads hold, 16 x k. */
void fragment_read(const uint32_t *const *a, const float *table, float (*out)[32]) {
    for (int l = 0; l < 32; l++)
        for (int w = 0; w < 4; w++)
            for (int i = 0; i < (table ? 4 : 2); i++) {
                int row = l / 4 + w % 2 * 8, per = table ? 4 : 2, k = w / 2 * 4 * per + l % 4 * per + i;
                out[row][k] = table ? table[a[l][w] >> 8 * i & 255] : __uint_as_float(a[l][w] >> 16 * i << 16);
            }
}

typedef float eight __attribute__((vector_size(32), aligned(4)));

void accumulate(tile *acc, int n, int n_k, const float (*a)[32], const float *b) {
    for (int c = 0; c < n; c += 8)
        for (int r = 0; r < 64; r += 2) {
            eight *out0 = (eight *)(acc->v + r * 256 + c), *out1 = (eight *)(acc->v + (r + 1) * 256 + c);
            eight x = *out0, y = *out1;
            for (int k = 0; k < n_k; k++) {
                eight w = *(const eight *)(b + k * 256 + c);
                x += a[r][k] * w;
                y += a[r + 1][k] * w;
            }
            *out0 = x;
            *out1 = y;
        }
}

void tile_move(tile *acc, const multiply &op, bool is_store) {
    for (int t = 0; t < 128; t++) {
        float *at = acc->v + cu_acc_row(t, 0) * 256 + cu_acc_col(t, 0), *d = op.d[t];
        for (int i = 0; i < op.m.n / 2; i += 4, at += 8) {
            float *places[4] = {at, at + 1, at + 8 * 256, at + 8 * 256 + 1};
            for (int e = 0; e < 4; e++)
                if (is_store)
                    d[i + e] = op.m.is_s8 ? __int_as_float((int32_t)*places[e]) : *places[e];
                else
                    *places[e] = op.m.is_s8 ? (float)__float_as_int(d[i + e]) : d[i + e];
        }
    }
}

void run_multiplies(block *blk, warpgroup *g, uint32_t until) {
    tile *acc = &me->acc;
    float *b = me->b;
    float a[64][32];
    float *held = NULL;
    multiply last;
    bool has_last = false;
    while (g->n_done < until) {
        multiply &op = g->queue.front();
        const di_emu_multiply &m = op.m;
        const float *table = table_of(m);
        int n_k = table ? 32 : 16;
        if (held != op.d[0] || (has_last && last.m.n != m.n)) {
            if (has_last)
                tile_move(acc, last, true);
            tile_move(acc, op, false);
        }
        if (!m.keep)
            for (int r = 0; r < 64; r++)
                memset(acc->v + r * 256, 0, sizeof(float) * (size_t)m.n);
        if (m.has_a_registers) {
            for (int w = 0; w < 4; w++) {
                const uint32_t *rows[32];
                for (int l = 0; l < 32; l++)
                    rows[l] = op.a[w * 32 + l];
                fragment_read(rows, table, a + w * 16);
            }
        } else {
            float *turned = me->turned;
            operand_read(blk, m.a_desc, 64, table, m.is_a_mn, turned, 64);
            for (int r = 0; r < 64; r++)
                for (int k = 0; k < n_k; k++)
                    a[r][k] = turned[k * 64 + r];
        }
        operand_read(blk, m.b_desc, m.n, table, m.is_b_mn, b, 256);
        accumulate(acc, m.n, n_k, a, b);
        held = op.d[0];
        last = op;
        has_last = true;
        g->queue.pop_front();
        g->n_done++;
    }
    if (has_last)
        tile_move(acc, last, true);
    if (g->n_done >= g->target) {
        g->n_waiting = 0;
        wake_all(&g->waiting);
    }
}

warpgroup *my_group() {
    fiber *f = me->now;
    DI_EMU_CHECK(f->b->fibers.size() >= (f->t.flat / 128 + 1) * 128, "a warpgroup function outside a whole warpgroup");
    return &f->b->groups[f->t.flat / 128];
}

} // namespace

void di_emu_wgmma(const di_emu_multiply &m, float *d, const uint32_t *a) {
    fiber *f = me->now;
    warpgroup *g = my_group();
    DI_EMU_CHECK(m.n % 8 == 0 && m.n >= 8 && m.n <= 256, "multiply of width %d", m.n);
    uint32_t number = f->n_multiplies++;
    if (number == g->n_done + g->queue.size()) {
        g->queue.emplace_back();
        g->queue.back().m = m;
        g->queue.back().n_here = 0;
    }
    multiply *op = &g->queue[number - g->n_done];
    DI_EMU_CHECK(op->m.n == m.n && op->m.is_e4m3 == m.is_e4m3 && op->m.is_s8 == m.is_s8 &&
                     op->m.has_a_registers == m.has_a_registers && op->m.is_a_mn == m.is_a_mn &&
                     op->m.is_b_mn == m.is_b_mn && op->m.a_desc == m.a_desc && op->m.b_desc == m.b_desc &&
                     op->m.keep == m.keep,
                 "threads of a warpgroup issue different multiplies: n %d and %d, A %016llx and %016llx, B %016llx and "
                 "%016llx, keep %d and %d",
                 op->m.n, m.n, (unsigned long long)op->m.a_desc, (unsigned long long)m.a_desc,
                 (unsigned long long)op->m.b_desc, (unsigned long long)m.b_desc, op->m.keep, m.keep);
    op->d[f->t.flat % 128] = d;
    if (a)
        memcpy(op->a[f->t.flat % 128], a, 16);
    if (++op->n_here == 128 && !me->j->how.is_late)
        run_multiplies(f->b, g, number + 1);
}
void di_emu_wgmma_commit() {
    fiber *f = me->now;
    (void)my_group();
    f->multiply_groups.push_back(f->n_multiplies);
}
void di_emu_wgmma_wait(unsigned n) {
    fiber *f = me->now;
    warpgroup *g = my_group();
    size_t n_groups = f->multiply_groups.size();
    if (n_groups <= n)
        return;
    uint32_t target = f->multiply_groups[n_groups - n - 1];
    f->multiply_groups.erase(f->multiply_groups.begin(), f->multiply_groups.end() - n);
    if (g->n_done >= target)
        return;
    DI_EMU_CHECK(g->n_waiting == 0 || g->target == target, "threads of a warpgroup wait for different multiplies");
    g->target = target;
    if (++g->n_waiting < 128) {
        g->waiting.push_back(f);
        sleep_on("the wait of a warpgroup", target, n);
        return;
    }
    run_multiplies(f->b, g, target);
}

namespace {

struct matrix_lane {
    uint32_t *r;
    const uint32_t *from;
    uint32_t smem;
    int n;
    bool is_trans;
};
/* 16-bit element (row, col) of matrix i as lanes hold it: lane 4*row + col/2, half col%2. */
void ldmatrix_all(void **args, uint32_t) {
    auto **lanes = (matrix_lane **)args;
    const matrix_lane *first = lanes[0];
    for (int i = 0; i < first->n; i++)
        for (int row = 0; row < 8; row++) {
            const uint8_t *p = (const uint8_t *)di_emu_pointer(lanes[i * 8 + row]->smem, 16);
            for (int col = 0; col < 8; col++) {
                int r = first->is_trans ? col : row, c = first->is_trans ? row : col;
                uint16_t v;
                memcpy(&v, p + 2 * col, 2);
                uint32_t *to = &lanes[4 * r + c / 2]->r[i];
                *to = c % 2 ? (*to & 0xFFFFu) | (uint32_t)v << 16 : (*to & 0xFFFF0000u) | v;
            }
        }
}
void stmatrix_all(void **args, uint32_t) {
    auto **lanes = (matrix_lane **)args;
    const matrix_lane *first = lanes[0];
    for (int i = 0; i < first->n; i++)
        for (int row = 0; row < 8; row++) {
            uint8_t *p = (uint8_t *)di_emu_pointer(lanes[i * 8 + row]->smem, 16);
            for (int col = 0; col < 8; col++) {
                int r = first->is_trans ? col : row, c = first->is_trans ? row : col;
                uint16_t v = (uint16_t)(lanes[4 * r + c / 2]->from[i] >> 16 * (c % 2));
                memcpy(p + 2 * col, &v, 2);
            }
        }
}

struct mma_lane {
    float *d;
    const uint32_t *a, *b;
};
template <bool E4M3> void mma_all(void **args, uint32_t) {
    auto **lanes = (mma_lane **)args;
    const float *table = e4m3_table();
    const uint32_t *rows[32];
    float a[16][32], b[32][8];
    enum { PER = E4M3 ? 4 : 2, K = 8 * PER };
    for (int l = 0; l < 32; l++) {
        rows[l] = lanes[l]->a;
        for (int w = 0; w < 2; w++)
            for (int i = 0; i < PER; i++)
                b[w * 4 * PER + l % 4 * PER + i][l / 4] =
                    E4M3 ? table[lanes[l]->b[w] >> 8 * i & 255] : __uint_as_float(lanes[l]->b[w] >> 16 * i << 16);
    }
    fragment_read(rows, E4M3 ? e4m3_table() : NULL, a);
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++) {
            float sum = lanes[l]->d[i];
            for (int k = 0; k < K; k++)
                sum += a[cu_acc_row(l, i)][k] * b[k][cu_acc_col(l, i)];
            lanes[l]->d[i] = sum;
        }
}
void movmatrix_all(void **args, uint32_t) {
    auto **lanes = (di_emu_lane_word **)args;
    for (int r = 0; r < 8; r++)
        for (int c = 0; c < 8; c++) {
            uint64_t v = lanes[4 * c + r / 2]->in >> 16 * (r % 2) & 0xFFFF;
            lanes[4 * r + c / 2]->out |= v << 16 * (c % 2);
        }
}

} // namespace

void di_emu_ldmatrix(uint32_t *r, uint32_t smem, int n, bool is_trans) {
    matrix_lane lane = {r, NULL, smem, n, is_trans};
    di_emu_meet("ldmatrix", 0xFFFFFFFFu, &lane, ldmatrix_all);
}
void di_emu_stmatrix(uint32_t smem, const uint32_t *r, int n, bool is_trans) {
    matrix_lane lane = {NULL, r, smem, n, is_trans};
    di_emu_meet("stmatrix", 0xFFFFFFFFu, &lane, stmatrix_all);
}
void di_emu_mma(float *d, const uint32_t *a, const uint32_t *b, bool is_e4m3) {
    mma_lane lane = {d, a, b};
    di_emu_meet(is_e4m3 ? "mma.sync of e4m3" : "mma.sync of bf16", 0xFFFFFFFFu, &lane,
                is_e4m3 ? mma_all<true> : mma_all<false>);
}
uint32_t di_emu_movmatrix(uint32_t v) {
    di_emu_lane_word lane = {v, 0, di_emu_now->lane, 0, 32};
    di_emu_meet("movmatrix", 0xFFFFFFFFu, &lane, movmatrix_all);
    return (uint32_t)lane.out;
}

/* ---- tensor memory, and the tensor cores that work on it -----------------------------------------------------------
 * What one thread issues is done in order, but scales may overtake multiplies: that order is not promised. A kernel
 * sees only by a commit that it is done. */

namespace {

const uint8_t *tensor_shared_at(void *b, uint32_t address) {
    return pointer_in((block *)b, address, 16);
}
void tensor_check(const tensor_operand &o, uint32_t n_rows, uint32_t n_chunks) {
    for (uint32_t r = 0; r < n_rows; r++)
        for (uint32_t c = 0; c < n_chunks; c++)
            (void)pointer_in(me->now->b, o.address(r, c), 16);
}

void run_tensor(block *b) {
    auto next = b->tensor.begin();
    if (me->j->how.seed && next_random() % 2) {
        auto scales = std::find_if(next, b->tensor.end(), [](const auto &op) { return op.step == TENSOR_SCALES; });
        next = scales == b->tensor.end() ? next : scales;
    }
    tensor_operation op = *next;
    b->tensor.erase(next);
    if (op.step == TENSOR_COMMIT) {
        mbar_arrive(mbar_find(b, op.bar));
        return;
    }
    const char *wrong = tensor_run(&b->tmem, op, tensor_shared_at, b);
    if (wrong)
        fail_after(wrong);
}
void tensor_issue(const tensor_operation &op) {
    fiber *f = me->now;
    DI_EMU_CHECK(!f->b->tensor_issuer || f->b->tensor_issuer == f,
                 "the tensor core's work of two threads (%u and %u) before a commit", f->t.flat,
                 f->b->tensor_issuer->t.flat);
    f->b->tensor_issuer = op.step == TENSOR_COMMIT ? NULL : f;
    f->b->tensor.push_back(op);
    /* Shuffled, late copies meet a tensor core that is late or early. */
    if (me->j->how.is_late && (!me->j->how.seed || next_random() % 2)) {
        me->put_off.push_back({f->b, 0, NULL, 0, 0, 0, {}, true});
        return;
    }
    while (!f->b->tensor.empty())
        run_tensor(f->b);
    auto &later = me->put_off;
    later.erase(std::remove_if(later.begin(), later.end(), [f](const bulk &k) { return k.is_tensor && k.b == f->b; }),
                later.end());
}

struct tmem_lane {
    uint32_t *to, address, n;
    float *v;
};
void tmem_take_all(void **args, uint32_t) {
    const tmem_lane *lane = (const tmem_lane *)args[0];
    block *b = me->now->b;
    tensor_memory *m = &b->tmem;
    uint32_t n = lane->n;
    DI_EMU_CHECK(n >= 32 && n <= TMEM_COLUMNS && (n & (n - 1)) == 0, "taking %u columns of tensor memory", n);
    DI_EMU_CHECK(!m->is_done && !m->n, "taking tensor memory %s",
                 m->n ? "twice: not modelled" : "after having done so");
    m->cells.assign(TMEM_LANES * TMEM_COLUMNS, 0xFFFFFFFFu);
    m->n = n;
    m->first = TMEM_COLUMNS - n; /* another block may have those before */
    m->warp = me->now->t.warp;
    *lane->to = m->first;
}
void tmem_give_all(void **args, uint32_t) {
    const tmem_lane *lane = (const tmem_lane *)args[0];
    tensor_memory *m = &me->now->b->tmem;
    DI_EMU_CHECK(m->n && lane->address == m->first && lane->n == m->n && m->warp == me->now->t.warp,
                 "giving back %u columns of tensor memory at 0x%x: warp %u took %u at 0x%x", lane->n, lane->address,
                 m->warp, m->n, m->first);
    DI_EMU_CHECK(me->now->b->tensor.empty(), "giving back tensor memory that the tensor core works on");
    m->n = 0;
}
void tmem_load_all(void **args, uint32_t) {
    auto **lanes = (tmem_lane **)args;
    tensor_memory *m = &me->now->b->tmem;
    uint32_t address = lanes[0]->address, lane = me->now->t.warp % 4 * TMEM_QUARTER;
    DI_EMU_CHECK(address >> 16 == lane, "warp %u loads tensor memory 0x%x, expected lanes from %u on", me->now->t.warp,
                 address, lane);
    m->check("loading", address & 0xFFFF, lanes[0]->n);
    for (uint32_t l = 0; l < TMEM_QUARTER; l++) {
        DI_EMU_CHECK(lanes[l]->address == address, "lanes of a warp load tensor memory 0x%x and 0x%x", address,
                     lanes[l]->address);
        for (uint32_t c = 0; c < lanes[0]->n; c++)
            lanes[l]->v[c] = __uint_as_float(m->at(lane + l, (address & 0xFFFF) + c));
    }
}

} // namespace

void di_emu_tmem_take(uint32_t *to, uint32_t n) {
    (void)di_emu_pointer(di_emu_address(to), 4);
    tmem_lane lane = {to, 0, n, NULL};
    di_emu_meet("tcgen05.alloc", 0xFFFFFFFFu, &lane, tmem_take_all);
}
void di_emu_tmem_done() {
    di_emu_meet("tcgen05.relinquish_alloc_permit", 0xFFFFFFFFu, NULL,
                [](void **, uint32_t) { me->now->b->tmem.is_done = true; });
}
void di_emu_tmem_give(uint32_t tmem, uint32_t n) {
    tmem_lane lane = {NULL, tmem, n, NULL};
    di_emu_meet("tcgen05.dealloc", 0xFFFFFFFFu, &lane, tmem_give_all);
}
void di_emu_tmem_load(float *v, int n, uint32_t tmem) {
    tmem_lane lane = {NULL, tmem, (uint32_t)n, v};
    di_emu_meet("tcgen05.ld", 0xFFFFFFFFu, &lane, tmem_load_all);
}
void di_emu_tc_scales(uint32_t tmem, uint64_t desc) {
    tensor_operation op = {};
    op.step = TENSOR_SCALES;
    op.to = tmem;
    op.a = tensor_operand(desc);
    me->now->b->tmem.check("scales", tmem, 4);
    tensor_check(op.a, TMEM_QUARTER, 1);
    tensor_issue(op);
}
void di_emu_tc_multiply(uint32_t d, uint64_t a, uint64_t b, uint32_t kind, uint32_t a_scale, uint32_t b_scale,
                        bool keep) {
    const tensor_memory &m = me->now->b->tmem;
    tensor_operation op = {};
    op.step = TENSOR_MULTIPLY;
    op.to = d;
    op.a = tensor_operand(a);
    op.b = tensor_operand(b);
    op.a_scale = a_scale;
    op.b_scale = b_scale;
    op.keep = keep;
    op.decode(kind);
    m.check("sums", d, op.n);
    m.check("scales of A", a_scale, 4);
    m.check("scales of B", b_scale, (op.n + 31) / 32);
    tensor_check(op.a, TMEM_LANES, 2);
    tensor_check(op.b, op.n, 2);
    tensor_issue(op);
}
void di_emu_tc_commit(uint32_t bar) {
    tensor_operation op = {};
    op.step = TENSOR_COMMIT;
    op.bar = bar;
    (void)mbar_find(me->now->b, bar);
    tensor_issue(op);
}
