/* Counts what a process does to files below a folder, and at the n-th act dies or fails.
 *
 * Preloaded (LD_PRELOAD). Acts: a file made or cut by open, write, fsync, rename, unlink, mkdir,
 * ftruncate. faults_arm(root, n, mode): at the n-th act mode 'k' kills the process (a write is half
 * done by then), 'e' fails it with EIO once, 'f' with ENOSPC from then on (but unlink works: that
 * frees space). faults_count() tells how many acts there were since.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static long at, done;
static char mode;

void faults_arm(const char *folder, long n, char how) {
  snprintf(root, sizeof root, "%s", folder);
  at = n;
  mode = how;
  done = 0;
}
long faults_count(void) { return done; }

static int inside(const char *path) {
  size_t n = strlen(root);
  return n > 0 && path != NULL && strncmp(path, root, n) == 0;
}
static int inside_fd(int fd) {
  char link[64], path[PATH_MAX];
  if (root[0] == 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  if (n < 0) return 0;
  path[n] = 0;
  return inside(path);
}
static void die(void) { kill(getpid(), SIGKILL); pause(); }

/* 0: go on, 1: fail with errno set, 2: die (after half of it) */
static int act(int frees) {
  done++;
  if (mode == 'k' && done == at) return 2;
  if (mode == 'e' && done == at) { errno = EIO; return 1; }
  if (mode == 'f' && done >= at && at > 0 && !frees) { errno = ENOSPC; return 1; }
  return 0;
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(ssize_t, "write", int, const void *, size_t);
  if (inside_fd(fd)) {
    int what = act(0);
    if (what == 1) return -1;
    if (what == 2) { (void)!real(fd, data, size / 2); die(); }
  }
  return real(fd, data, size);
}
int fsync(int fd) {
  REAL(int, "fsync", int);
  if (inside_fd(fd)) {
    int what = act(0);
    if (what == 1) return -1;
    if (what == 2) die();
  }
  return real(fd);
}
#define TRUNCATE(name) \
  int name(int fd, off_t size) { \
    REAL(int, #name, int, off_t); \
    if (inside_fd(fd)) { int what = act(0); if (what == 1) return -1; if (what == 2) die(); } \
    return real(fd, size); \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    REAL(int, #name, const char *, int, ...); \
    mode_t bits = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); \
      bits = va_arg(more, mode_t); va_end(more); } \
    if (inside(path) && (flags & (O_CREAT | O_TRUNC))) { \
      int what = act(0); if (what == 1) return -1; if (what == 2) die(); } \
    return real(path, flags, bits); \
  }
OPEN(open)
OPEN(open64)
#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    REAL(int, #name, int, const char *, int, ...); \
    mode_t bits = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { va_list more; va_start(more, flags); \
      bits = va_arg(more, mode_t); va_end(more); } \
    if (inside(path) && (flags & (O_CREAT | O_TRUNC))) { \
      int what = act(0); if (what == 1) return -1; if (what == 2) die(); } \
    return real(folder, path, flags, bits); \
  }
OPENAT(openat)
OPENAT(openat64)

int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  if (inside(to)) { int what = act(0); if (what == 1) return -1; if (what == 2) die(); }
  return real(from, to);
}
int renameat(int a, const char *from, int b, const char *to) {
  REAL(int, "renameat", int, const char *, int, const char *);
  if (inside(to)) { int what = act(0); if (what == 1) return -1; if (what == 2) die(); }
  return real(a, from, b, to);
}
int unlink(const char *path) {
  REAL(int, "unlink", const char *);
  if (inside(path)) { int what = act(1); if (what == 1) return -1; if (what == 2) die(); }
  return real(path);
}
int unlinkat(int folder, const char *path, int flags) {
  REAL(int, "unlinkat", int, const char *, int);
  if (inside(path)) { int what = act(1); if (what == 1) return -1; if (what == 2) die(); }
  return real(folder, path, flags);
}
int mkdir(const char *path, mode_t bits) {
  REAL(int, "mkdir", const char *, mode_t);
  if (inside(path)) { int what = act(0); if (what == 1) return -1; if (what == 2) die(); }
  return real(path, bits);
}
