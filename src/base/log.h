/* Log lines to standard error: "deepinfer: level: message". One write per line, so that threads don't mix. */
#ifndef DI_BASE_LOG_H
#define DI_BASE_LOG_H

typedef enum di_log_level { DI_LOG_ERROR, DI_LOG_WARN, DI_LOG_INFO, DI_LOG_DEBUG } di_log_level;

/* Set once before threads start; default warn. */
void di_log_set_level(di_log_level level);
di_log_level di_log_get_level(void);
void di_log(di_log_level level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
#define di_error_log(...) di_log(DI_LOG_ERROR, __VA_ARGS__)
#define di_warn(...) di_log(DI_LOG_WARN, __VA_ARGS__)
#define di_info(...) di_log(DI_LOG_INFO, __VA_ARGS__)
#define di_debug(...) di_log(DI_LOG_DEBUG, __VA_ARGS__)

#endif
