/* Uses the native library from many threads at once, for the compiler's checkers to watch.
 *
 * Some threads allocate and free, under a tag that stays awake and under one that others unmap
 * and map all the time. Exits with 1 and a line for the first thing that is not as promised.
 *
 * Usage: exerciser LIBCUDA
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct { uint64_t id, generation; unsigned long long address; size_t size, live; int device, tag; } Info;
typedef struct { size_t offset, size; } Piece;

int sb_init(const char *libcuda);
int sb_new_space(size_t share_below);
void *sb_alloc(ptrdiff_t size, int device, void *stream);
void sb_free(void *pointer, ptrdiff_t size, int device, void *stream);
void sb_enter_tag(int space, int tag);
int sb_last_error(void);
void sb_begin(int space);
void sb_end(int space);
size_t sb_extents(int space, Info *out, size_t most);
long sb_pieces(uint64_t id, Piece *out, size_t most);
int sb_steps(const uint64_t *ids, size_t count, int step, size_t *done);

enum { CREATE, RELEASE, MAP, UNMAP };
enum { SPACES = 2, ALLOCATORS = 4, ROUNDS = 120, SLOTS = 12, AWAKE = 0, MOVING = 1 };

static int spaces[SPACES];
static int running = ALLOCATORS;

static void expect(int held, const char *what) {
  if (held) return;
  fprintf(stderr, "not so: %s (%d)\n", what, sb_last_error());
  exit(1);
}

static unsigned next(unsigned *state) { return (*state = *state * 1664525u + 1013904223u) >> 8; }

/* Memory of its own that nobody else writes to, and memory that comes and goes under it. */
static void *allocate(void *argument) {
  unsigned number = (unsigned)(uintptr_t)argument, state = number;
  unsigned char *awake[SLOTS] = {0};
  size_t sizes[SLOTS] = {0};
  void *moving[SLOTS] = {0};
  for (unsigned round = 0; round < ROUNDS; round++) {
    expect(!sb_alloc((ptrdiff_t)1 << 62, 0, NULL) && sb_last_error() > 0, "there is no such room");
    size_t slot = next(&state) % SLOTS;
    int space = spaces[number % SPACES], device = (int)(number / SPACES % 2);
    for (size_t i = 0; awake[slot] && i < sizes[slot]; i += 4096)
      expect(awake[slot][i] == (unsigned char)(number + slot), "nobody else wrote there");
    sb_free(awake[slot], 0, device, NULL);
    sb_free(moving[slot], 0, device, NULL);
    sizes[slot] = 1 + next(&state) % 400000;
    sb_enter_tag(space, AWAKE);
    awake[slot] = sb_alloc((ptrdiff_t)sizes[slot], device, NULL);
    expect(awake[slot] != NULL, "there is memory");
    memset(awake[slot], (int)(number + slot), sizes[slot]);
    sb_enter_tag(space, MOVING);
    moving[slot] = sb_alloc((ptrdiff_t)sizes[slot], device, NULL);
    expect(moving[slot] != NULL, "there is memory for what moves");
  }
  for (size_t slot = 0; slot < SLOTS; slot++) {
    sb_free(awake[slot], 0, 0, NULL);
    sb_free(moving[slot], 0, 0, NULL);
  }
  __atomic_sub_fetch(&running, 1, __ATOMIC_SEQ_CST);
  return NULL;
}

static void step_all(const Info *infos, size_t count, int step) {
  uint64_t ids[512];
  size_t moving = 0, done;
  for (size_t i = 0; i < count; i++)
    if (infos[i].tag == MOVING) ids[moving++] = infos[i].id;
  expect(sb_steps(ids, moving, step, &done) == 0 && done == moving, "the step is legal");
}

static void *move(void *argument) {
  int space = *(int *)argument;
  static _Thread_local Info infos[512];
  Piece pieces[64];
  while (__atomic_load_n(&running, __ATOMIC_SEQ_CST)) {
    sb_begin(space);
    size_t count = sb_extents(space, infos, 512);
    expect(count <= 512, "not so many extents");
    step_all(infos, count, UNMAP);
    for (size_t i = 0; i < count; i++) {
      long found = sb_pieces(infos[i].id, pieces, 64);
      expect(found >= 0, "a busy space keeps its extents");
      for (long j = 0; j < found && j < 64; j++)
        expect(pieces[j].offset + pieces[j].size <= infos[i].size, "pieces lie inside");
    }
    step_all(infos, count, CREATE);
    step_all(infos, count, MAP);
    sb_end(space);
  }
  return NULL;
}

/* A child must be able to allocate, in vain, and to free, while others hold the lock. */
static void *fork_often(void *argument) {
  (void)argument;
  while (__atomic_load_n(&running, __ATOMIC_SEQ_CST)) {
    pid_t child = fork();
    if (!child) {
      alarm(20);
      _exit(sb_alloc(1, 0, NULL) != NULL);
    }
    int status = 1;
    expect(waitpid(child, &status, 0) == child && !status, "the child ends and gets no memory");
    usleep(20000);
  }
  return NULL;
}

int main(int count, char **arguments) {
  pthread_t allocators[ALLOCATORS], movers[SPACES], forker;
  expect(count > 1 && sb_init(arguments[1]) == 0, "the driver is found");
  for (int i = 0; i < SPACES; i++) spaces[i] = sb_new_space(i ? 1u << 20 : 0);
  int forks = count > 2;
  if (forks) pthread_create(&forker, NULL, fork_often, NULL);
  for (uintptr_t i = 0; i < ALLOCATORS; i++) pthread_create(&allocators[i], NULL, allocate, (void *)i);
  for (int i = 0; i < SPACES; i++) pthread_create(&movers[i], NULL, move, &spaces[i]);
  for (int i = 0; i < ALLOCATORS; i++) pthread_join(allocators[i], NULL);
  for (int i = 0; i < SPACES; i++) pthread_join(movers[i], NULL);
  if (forks) pthread_join(forker, NULL);
  void *driver = dlopen(arguments[1], RTLD_NOW);
  size_t (*rows[2])(void *, size_t);
  const char *names[] = {"sim_mappings", "sim_reservations"};
  for (int i = 0; i < 2; i++) {
    void *found = dlsym(driver, names[i]);
    memcpy(&rows[i], &found, sizeof found);
    expect(rows[i](NULL, 0) == 0, names[i]);
  }
  for (int i = 0; i < SPACES; i++) expect(sb_extents(spaces[i], NULL, 0) == 0, "no extents are left");
  puts("done");
  return 0;
}
