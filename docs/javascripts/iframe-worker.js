// Browsers start no worker from a page that was opened as a file. There the site's search runs in a
// hidden frame instead, which loads the worker's script and exchanges the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.frame = frame.contentWindow;
      this.frame.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.frame.importScripts = (...urls) =>
        urls.reduce((before, url) => before.then(() => this.load(url)), Promise.resolve());
      this.ready = this.load(script);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.document.createElement("script");
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.frameElement.remove();
    }
  };
}
