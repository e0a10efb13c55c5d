/* Threads that share tasks, none of which looks at another. */

#include "kernels.h"
#include <pthread.h>

typedef struct {
    void (*task)(const void *work, int64_t number);
    const void *work;
    int64_t tasks, next;
} Queue;

static void *take_tasks(void *argument) { /* whoever is free takes the next: threads that are held up hold nobody up */
    Queue *queue = argument;
    for (;;) {
        const int64_t number = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
        if (number >= queue->tasks) return 0;
        queue->task(queue->work, number);
    }
}

void zero_fn_by_threads(void (*task)(const void *work, int64_t number), const void *work, int64_t tasks, int32_t threads) {
    enum { MOST_THREADS = 256 };
    Queue queue = {task, work, tasks, 0};
    pthread_t others[MOST_THREADS];
    int started = 0;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    while (started + 1 < threads && started + 1 < tasks && !pthread_create(others + started, 0, take_tasks, &queue)) started++;
    take_tasks(&queue);
    while (started) pthread_join(others[--started], 0);
}
