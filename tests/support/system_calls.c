/* Makes system calls fail on files under a path: preloaded into a process, and armed through ctypes.

   Calls on paths or descriptors under the prefix are counted from 1. Call k fails with an error (mode 0: once, mode 1: and all
   after it), or, if it reads or writes, moves half of its bytes (mode 2). */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char prefix[512], last[1200];
static atomic_int armed, wanted, number, mode, count, hits;

void faults_arm(const char *path, int k, int error, int how) {
  snprintf(prefix, sizeof prefix, "%s", path);
  wanted = k, number = error, mode = how, count = 0, hits = 0, last[0] = 0, armed = 1;
}
void faults_disarm(void) { armed = 0; }
int faults_count(void) { return count; }
int faults_hits(void) { return hits; }
const char *faults_last(void) { return last; }

/* Returns 0: go on, 1: fail, 2: move half. */
static int hit(const char *path, int fd, const char *name, int moves) {
  if (!armed) return 0;
  int before = errno, found = 0;
  char whole[1100], link[64];
  if (!path || path[0] != '/') {
    if (fd == AT_FDCWD) snprintf(link, sizeof link, "/proc/self/cwd");
    else snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, whole, 1000);
    if (n < 0) goto done;
    whole[n] = 0;
    if (path && *path) strncat(strcat(whole, "/"), path, 1099 - strlen(whole));
    path = whole;
  }
  if (strncmp(path, prefix, strlen(prefix))) goto done;
  int c = atomic_fetch_add(&count, 1) + 1;
  if (c == wanted || (mode == 1 && c > wanted)) {
    found = mode == 2 ? (moves ? 2 : 0) : 1;
    if (found && !hits) snprintf(last, sizeof last, "%s %s", name, path);
    if (found) hits++;
  }
done:
  errno = before;
  return found;
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FAIL(path, fd, moves, bad) int h = hit(path, fd, __func__, moves); if (h == 1) { errno = number; return bad; }
#define MODE mode_t m = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); m = va_arg(a, int); va_end(a); }
#define OPEN(name) int name(const char *p, int flags, ...) { MODE REAL(name); FAIL(p, AT_FDCWD, 0, -1) return real(p, flags, m); }
#define OPENAT(name) int name(int d, const char *p, int flags, ...) { MODE REAL(name); FAIL(p, d, 0, -1) return real(d, p, flags, m); }
#define MOVE(name, pointer) ssize_t name(int fd, pointer b, size_t n) { REAL(name); FAIL(0, fd, 1, -1) return real(fd, b, h == 2 && n > 1 ? n / 2 : n); }
#define MOVEAT(name, pointer, offset) ssize_t name(int fd, pointer b, size_t n, offset o) { REAL(name); FAIL(0, fd, 1, -1) return real(fd, b, h == 2 && n > 1 ? n / 2 : n, o); }
/* Half of a vector: its first part, or half of that. */
#define HALF struct iovec one = v[0]; if (h == 2) { if (n == 1 && one.iov_len > 1) one.iov_len /= 2; v = &one; n = 1; }
#define VECTOR(name, offset) ssize_t name(int fd, const struct iovec *v, int n, offset o) { REAL(name); FAIL(0, fd, 1, -1) HALF return real(fd, v, n, o); }
#define VECTOR2(name, offset) ssize_t name(int fd, const struct iovec *v, int n, offset o, int f) { REAL(name); FAIL(0, fd, 1, -1) HALF return real(fd, v, n, o, f); }
#define PATH0(name) int name(const char *p) { REAL(name); FAIL(p, AT_FDCWD, 0, -1) return real(p); }
#define FD0(name) int name(int fd) { REAL(name); FAIL(0, fd, 0, -1) return real(fd); }

OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)
MOVE(read, void *) MOVE(write, const void *)
MOVEAT(pread, void *, off_t) MOVEAT(pread64, void *, off64_t) MOVEAT(pwrite, const void *, off_t) MOVEAT(pwrite64, const void *, off64_t)
VECTOR(preadv, off_t) VECTOR(preadv64, off64_t) VECTOR(pwritev, off_t) VECTOR(pwritev64, off64_t)
VECTOR2(preadv2, off_t) VECTOR2(preadv64v2, off64_t) VECTOR2(pwritev2, off_t) VECTOR2(pwritev64v2, off64_t)
FD0(fsync) FD0(fdatasync) PATH0(unlink) PATH0(rmdir)
int unlinkat(int d, const char *p, int f) { REAL(unlinkat); FAIL(p, d, 0, -1) return real(d, p, f); }
int rename(const char *a, const char *b) { REAL(rename); FAIL(b, AT_FDCWD, 0, -1) return real(a, b); }
int renameat(int d, const char *a, int e, const char *b) { REAL(renameat); FAIL(b, e, 0, -1) return real(d, a, e, b); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); FAIL(0, fd, 0, -1) return real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); FAIL(0, fd, 0, -1) return real(fd, n); }
int mkdir(const char *p, mode_t m) { REAL(mkdir); FAIL(p, AT_FDCWD, 0, -1) return real(p, m); }
int mkdirat(int d, const char *p, mode_t m) { REAL(mkdirat); FAIL(p, d, 0, -1) return real(d, p, m); }
int flock(int fd, int how) { REAL(flock); FAIL(0, fd, 0, -1) return real(fd, how); }
int fstat(int fd, struct stat *s) { REAL(fstat); FAIL(0, fd, 0, -1) return real(fd, s); }
int fstat64(int fd, struct stat64 *s) { REAL(fstat64); FAIL(0, fd, 0, -1) return real(fd, s); }
int stat(const char *p, struct stat *s) { REAL(stat); FAIL(p, AT_FDCWD, 0, -1) return real(p, s); }
int stat64(const char *p, struct stat64 *s) { REAL(stat64); FAIL(p, AT_FDCWD, 0, -1) return real(p, s); }
int lstat(const char *p, struct stat *s) { REAL(lstat); FAIL(p, AT_FDCWD, 0, -1) return real(p, s); }
int lstat64(const char *p, struct stat64 *s) { REAL(lstat64); FAIL(p, AT_FDCWD, 0, -1) return real(p, s); }
int fstatat(int d, const char *p, struct stat *s, int f) { REAL(fstatat); FAIL(p, d, 0, -1) return real(d, p, s, f); }
int fstatat64(int d, const char *p, struct stat64 *s, int f) { REAL(fstatat64); FAIL(p, d, 0, -1) return real(d, p, s, f); }
DIR *opendir(const char *p) { REAL(opendir); FAIL(p, AT_FDCWD, 0, 0) return real(p); }
void *mmap(void *a, size_t n, int p, int f, int fd, off_t o) {
  REAL(mmap);
  if (fd >= 0) { FAIL(0, fd, 0, MAP_FAILED) }
  return real(a, n, p, f, fd, o);
}
void *mmap64(void *a, size_t n, int p, int f, int fd, off64_t o) {
  REAL(mmap64);
  if (fd >= 0) { FAIL(0, fd, 0, MAP_FAILED) }
  return real(a, n, p, f, fd, o);
}
/* A close that fails closes its descriptor all the same. */
int close(int fd) {
  REAL(close);
  int h = hit(0, fd, "close", 0), done = real(fd);
  if (h == 1) { errno = number; return -1; }
  return done;
}
